package main

import (
	"context"
	"errors"
	"fmt"

	"quarry/api"
	"quarry/converter"
	"quarry/converter/oci"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/image"
)

// remake converts an image again. Of the store's statement it takes the platform and
// the chunk size, which the result has to have too.
func (s *signing) remake(ctx context.Context, ref image.Ref, st image.Statement) (*converter.Remade, error) {
	source, from, done, err := s.from(ctx, ref, st.Platform)
	if err != nil {
		return nil, err
	}
	defer done()
	made, err := converter.Remake(ctx, converter.Config{
		ChunkSize: st.ChunkSize, Limits: s.bounds, Progress: func(e converter.Event) { s.bar.step(progressOf(e)) },
	}, source, from)
	if err != nil {
		return nil, s.unread(err)
	}
	if made.Statement.Source != *ref.Digest {
		return nil, fmt.Errorf("--source %s is %s, another image", s.source, made.Statement.Source)
	}
	return made, nil
}

// from returns where the source of an image is, and how it is read. The caller calls
// done.
func (s *signing) from(ctx context.Context, ref image.Ref, p image.Platform) (source string, cfg oci.Config, done func(), err error) {
	cfg.Platform = p
	if s.source != "" {
		cfg.Credentials, err = oci.UserCredentials(ctx, s.source)
		return s.source, cfg, func() {}, err
	}
	r, err := s.target.registry(ctx, ref.Repo)
	if err != nil {
		return "", cfg, nil, err
	}
	cfg.Credentials, cfg.Transport, cfg.Plain = r.credentials, r.transport, r.plain
	return fmt.Sprintf("registry://%s/%s@%s", r.host, ref.Repo, ref.Digest), cfg, r.transport.CloseIdleConnections, nil
}

// unread adds to the error of reading a source what to do about it.
func (s *signing) unread(err error) error {
	if errors.Is(err, oci.ErrNoBlob) && s.source == "" {
		return fmt.Errorf("%w: the store has not, or no longer, what the image was converted from: give --source SRC with the same image", err)
	}
	return err
}

// lacking are the platforms that the source of an image lists, or those of --platforms
// that it lists, and of which the store shows no image: it was told not to convert them,
// or it hides them.
func (s *signing) lacking(ctx context.Context, ref image.Ref, there api.Signable) (names []string, err error) {
	shown := map[string]bool{}
	var one image.Platform
	for _, im := range there.Images {
		shown[im.Platform] = true
		if one, err = image.ParsePlatform(im.Platform); err != nil {
			return nil, fmt.Errorf("%w: %w", errDamage, err)
		}
	}
	source, from, done, err := s.from(ctx, ref, one)
	if err != nil {
		return nil, err
	}
	defer done()
	index, list, err := oci.Listed(ctx, source, from, s.platforms)
	if err == nil && index != *ref.Digest {
		err = fmt.Errorf("source %s is %s, another image", source, index)
	}
	if err != nil {
		return nil, fmt.Errorf("which platforms it has: %w", s.unread(err))
	}
	for _, p := range list {
		if !shown[p.String()] {
			names = append(names, p.String())
		}
	}
	return names, nil
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
