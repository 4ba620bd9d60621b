package main

import (
	"context"
	"errors"
	"fmt"

	"quarry/converter"
	"quarry/converter/oci"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/image"
)

// remake converts an image again. Of the store's statement it takes the platform and
// the chunk size, which the result has to have too.
func (s *signing) remake(ctx context.Context, ref image.Ref, st image.Statement) (*converter.Remade, error) {
	from := oci.Config{Platform: st.Platform}
	source := s.source
	var err error
	if source != "" {
		from.Credentials, err = oci.UserCredentials(ctx, source)
	} else {
		var r *storeRegistry
		if r, err = s.target.registry(ctx, ref.Repo); err == nil {
			defer r.transport.CloseIdleConnections()
			from.Credentials, from.Transport, from.Plain = r.credentials, r.transport, r.plain
			source = fmt.Sprintf("registry://%s/%s@%s", r.host, ref.Repo, ref.Digest)
		}
	}
	if err != nil {
		return nil, err
	}
	made, err := converter.Remake(ctx, converter.Config{
		ChunkSize: st.ChunkSize, Limits: s.bounds, Progress: func(e converter.Event) { s.bar.step(progressOf(e)) },
	}, source, from)
	if errors.Is(err, oci.ErrNoBlob) && s.source == "" {
		err = fmt.Errorf("%w: the store has not, or no longer, what the image was converted from: give --source SRC with the same image", err)
	}
	if err != nil {
		return nil, err
	}
	if made.Statement.Source != *ref.Digest {
		return nil, fmt.Errorf("--source %s is %s, another image", s.source, made.Statement.Source)
	}
	return made, nil
}

// differs says what the store has other than it should.
func (s *signing) differs(ctx context.Context, made *converter.Remade, st image.Statement) error {
	if st.Converter != made.Statement.Converter {
		return fmt.Errorf("the store's image was made by %s, this program is %s: sign with the quarry that made it, or let that of the store convert it again",
			oneLine(st.Converter), made.Statement.Converter)
	}
	what := "the statement says another thing of the same metadata"
	switch {
	case st.Bootstrap != made.Statement.Bootstrap:
		what = s.firstDifference(ctx, made, st)
	case st.Config != made.Statement.Config:
		what = fmt.Sprintf("its config is %s and should be %s", st.Config, made.Statement.Config)
	}
	return fmt.Errorf("%w: the store has another image for %s than its source gives: %s. Nothing was signed: the store, or what it runs on, is not to be believed",
		errDamage, st.Platform, oneLine(what))
}

// firstDifference compares the trees of two bootstraps.
func (s *signing) firstDifference(ctx context.Context, made *converter.Remade, st image.Statement) string {
	var theirs *rafs.Image
	boot, err := s.store.Bootstrap(ctx, st.Bootstrap, st.BootstrapSize)
	if err == nil {
		theirs, err = rafs.Decode(boot)
	}
	if err != nil {
		return fmt.Sprintf("its metadata is %s and should be %s (%v)", st.Bootstrap, made.Statement.Bootstrap, err)
	}
	ours, err := rafs.Decode(made.Bootstrap)
	if err != nil {
		return err.Error() // not after it was decoded once
	}
	if d := tree.Difference(ours.Tree, theirs.Tree); d != "" {
		return d
	}
	return "its metadata has the same tree, written otherwise"
}
