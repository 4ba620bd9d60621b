package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"

	"quarry/api"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/check"
	"quarry/store/chunk"
)

// check is the server's side of quarry check.
func (o *owner) check(ctx context.Context, r api.CheckRequest, report func(api.Problem)) (api.CheckSummary, error) {
	if r.From == "" {
		return o.checkOnce(ctx, r.Quick, nil, report)
	}
	if r.Quick {
		return api.CheckSummary{}, fmt.Errorf("%w: a repair reads everything, so it is not quick", api.ErrBadRequest)
	}
	from, err := repairSource(r)
	if err != nil {
		return api.CheckSummary{}, fmt.Errorf("%w: %w", api.ErrBadRequest, err)
	}
	defer from.Close()
	var lost []chunk.Digest
	seen := map[chunk.Digest]bool{}
	sum, err := o.checkOnce(ctx, false, func(d chunk.Digest) {
		if !seen[d] {
			seen[d] = true
			lost = append(lost, d)
		}
	}, report)
	if err != nil || sum.Problems == 0 {
		return sum, err
	}
	repaired, size, err := o.fetchLost(ctx, from, lost, report)
	if err != nil {
		return sum, fmt.Errorf("repair from %s: %w", r.From, err)
	}
	report(api.Problem{
		Kind: "repaired", Object: r.From, Note: true,
		Message: fmt.Sprintf("%d of %d chunks that images lack were fetched, verified and stored anew; checked again:", repaired, len(lost)),
	})
	sum, err = o.checkOnce(ctx, false, nil, report)
	sum.Repaired, sum.RepairedBytes, sum.Unrepaired = repaired, size, int64(len(lost))-repaired
	return sum, err
}

// checkOnce checks; lost is told of the chunks that images lack, and may be nil.
func (o *owner) checkOnce(ctx context.Context, quick bool, lost func(chunk.Digest), report func(api.Problem)) (api.CheckSummary, error) {
	trust, err := o.accepted()
	if err != nil {
		return api.CheckSummary{}, err
	}
	sum, err := check.Run(ctx, check.Config{
		Store: o.store, Bucket: o.bucket, Catalog: o.catalog, Trust: trust, MACKey: o.macKey, Quick: quick, Signed: o.signing != nil, Lost: lost,
	}, func(p check.Problem) {
		q := api.Problem{Kind: p.Kind, Object: p.Object, Offset: p.Offset, Message: p.Message, Images: p.Images, Note: p.Note}
		if !p.Digest.IsZero() {
			q.Digest = p.Digest.String()
		}
		report(q)
	})
	return api.CheckSummary{Packs: sum.Packs, Chunks: sum.Chunks, Bytes: sum.Bytes, Images: sum.Images, Problems: sum.Problems}, err
}

// repairSource is a client of the node that has what this one lacks.
func repairSource(r api.CheckRequest) (*client.Client, error) {
	cfg := client.Config{URL: r.From, Token: client.FixedToken(r.FromToken)}
	if r.FromCA != "" {
		cfg.CA = x509.NewCertPool()
		if !cfg.CA.AppendCertsFromPEM([]byte(r.FromCA)) {
			return nil, errors.New("the certificates for --from are none")
		}
	}
	return client.New(cfg)
}

// fetchLost stores the chunks anew that the other node has: in new packs, which the
// index prefers to copies that are damaged or in packs that are missing. The client has
// compared each with its digest. What cannot be had is told to report.
func (o *owner) fetchLost(ctx context.Context, from store.BatchGetter, lost []chunk.Digest, report func(api.Problem)) (repaired, size int64, err error) {
	s, _ := o.session()
	defer s.End()
	err = o.store.Write(ctx, func(ctx context.Context, put store.Putter) error {
		return from.GetBatch(ctx, lost, func(d chunk.Digest, p []byte, err error) error {
			if errors.Is(err, store.ErrUnreachable) || errors.Is(err, store.ErrUnauthorised) || ctx.Err() != nil {
				return errors.Join(err, ctx.Err())
			}
			if err != nil {
				report(api.Problem{Kind: "not-repaired", Object: "chunks/" + d.String(), Digest: d.String(), Note: true, Message: err.Error()})
				return nil
			}
			if _, err := put.Put(ctx, p); err != nil {
				return err
			}
			repaired++
			size += int64(len(p))
			return nil
		})
	})
	return repaired, size, err
}
