package check

import (
	"context"
	"errors"
	"fmt"

	"quarry/store/bucket"
	"quarry/store/image"
	"quarry/store/jobs"
	"quarry/store/trace"
)

// layers checks the layer records.
func (c *checker) layers(ctx context.Context) error {
	return c.records(ctx, image.LayersPrefix, Problem{Kind: "layer-record", Message: "removed, so the layer is read anew"}, c.layer)
}

// failures checks the failure records.
func (c *checker) failures(ctx context.Context) error {
	return c.records(ctx, image.FailuresPrefix, Problem{Kind: "failure-record", Message: "removed: it says nothing of a conversion"}, c.failure)
}

// traces checks the records of runs.
func (c *checker) traces(ctx context.Context) error {
	return c.records(ctx, trace.Prefix, Problem{Kind: "trace-record", Message: "removed: it is a hint alone"}, c.trace)
}

// jobs checks the records of conversions.
func (c *checker) jobs(ctx context.Context) error {
	return c.records(ctx, jobs.Prefix, Problem{Kind: "job-record", Message: "removed: push the image again, or ask for it"}, c.job)
}

// job returns what is wrong with a job record. One of another version is unknown.
func (c *checker) job(ctx context.Context, key string) (bad, err error) {
	raw, bad, err := c.record(ctx, key, jobs.MaxRecord)
	if raw == nil {
		return bad, err
	}
	r, err := jobs.Decode(raw)
	switch {
	case errors.Is(err, jobs.ErrVersion):
		return nil, nil
	case err == nil && jobs.Key(r.ID()) != key:
		err = fmt.Errorf("it is the record of job %s", r.ID())
	}
	return err, nil
}

// records removes and reports the objects below prefix that are no records: what
// bad says of one completes the problem p.
func (c *checker) records(ctx context.Context, prefix string, p Problem, bad func(context.Context, string) (error, error)) error {
	for obj, err := range c.cfg.Bucket.List(ctx, prefix) {
		if err != nil {
			return c.unlisted(prefix, err)
		}
		damage, err := bad(ctx, obj.Key)
		if err != nil {
			return fmt.Errorf("check %s: %w", obj.Key, err)
		}
		if damage == nil {
			continue
		}
		if err := c.cfg.Bucket.Delete(ctx, obj.Key); err != nil {
			return fmt.Errorf("remove damaged %s: %w", obj.Key, err)
		}
		c.tell(Problem{Kind: p.Kind, Object: obj.Key, Message: fmt.Sprintf("%v; %s", damage, p.Message)})
	}
	return nil
}

// record reads a record of at most limit bytes, which may be gone by now: raw is
// nil then.
func (c *checker) record(ctx context.Context, key string, limit int64) (raw []byte, bad, err error) {
	raw, err = bucket.ReadReplaced(ctx, c.cfg.Bucket, key, limit)
	switch {
	case errors.Is(err, bucket.ErrNotFound):
		return nil, nil, nil
	case isDamage(err):
		return nil, err, nil
	}
	return raw, nil, err
}

// layer returns what is wrong with a layer record. One of another version is
// unknown, and the layer's next conversion replaces it.
func (c *checker) layer(ctx context.Context, key string) (bad, err error) {
	raw, bad, err := c.record(ctx, key, image.MaxLayerRecord)
	if raw == nil {
		return bad, err
	}
	rec, err := image.DecodeLayer(raw, c.cfg.MACKey)
	switch {
	case errors.Is(err, image.ErrVersion):
		return nil, nil
	case errors.Is(err, image.ErrBadMAC), errors.Is(err, image.ErrMalformed):
		return err, nil
	case err != nil:
		return nil, err // the key is none
	case image.LayerKey(rec.Layer) != key:
		return fmt.Errorf("it is the record of layer %s", rec.Layer), nil
	}
	return nil, nil
}

// failure returns what is wrong with a failure record. One of another version is
// unknown.
func (c *checker) failure(ctx context.Context, key string) (bad, err error) {
	raw, bad, err := c.record(ctx, key, image.MaxFailure)
	if raw == nil {
		return bad, err
	}
	f, err := image.DecodeFailure(raw)
	switch {
	case errors.Is(err, image.ErrVersion):
		return nil, nil
	case err != nil:
		return err, nil
	case image.FailureKey(f.Repo, f.Tag) != key:
		return fmt.Errorf("it is the record of %s:%s", f.Repo, f.Tag), nil
	}
	return nil, nil
}

// trace returns what is wrong with the record of a run. One of another version is
// unknown. Of what image it is does not matter: that may be gone.
func (c *checker) trace(ctx context.Context, key string) (bad, err error) {
	raw, bad, err := c.record(ctx, key, trace.MaxRecord)
	if raw == nil {
		return bad, err
	}
	k, ok := trace.ParseKey(key)
	r, err := trace.Decode(raw)
	switch {
	case !ok:
		return errors.New("its key is none of a trace record"), nil
	case errors.Is(err, trace.ErrVersion):
		return nil, nil
	case err != nil:
		return err, nil
	case trace.KeyOf(r, raw, k.Time) != k:
		return fmt.Errorf("it is another record, of image %s", r.Image), nil
	}
	return nil, nil
}
