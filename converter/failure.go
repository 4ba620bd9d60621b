package converter

import (
	"context"
	"errors"
	"time"

	"quarry/converter/oci"
	"quarry/store/bucket"
	"quarry/store/image"
)

// recordTime bounds the writing of a failure record, which happens also when the
// caller has gone.
const recordTime = 10 * time.Second

// recall notes whether the newest conversion of the name left its image unready.
// What it stored may never have been proved, so this one proves everything. A
// record that cannot be read counts as one.
func (c *conversion) recall(ctx context.Context) error {
	if c.req.Name.Repo == "" {
		return nil
	}
	_, err := c.cfg.Bucket.Stat(ctx, c.failureKey())
	switch {
	case errors.Is(err, bucket.ErrNotFound):
		return nil
	case err == nil || bucket.IsDamage(err):
		c.doubted = true
		return nil
	}
	return err
}

func (c *conversion) failureKey() string { return image.FailureKey(c.req.Name.Repo, c.req.Name.Tag) }

// begin notes that the conversion reads a layer, once: should it be killed, the
// record stays.
func (c *conversion) begin(ctx context.Context) error {
	if c.req.Name.Repo == "" {
		return nil
	}
	c.beginning.Lock()
	defer c.beginning.Unlock()
	if c.begun {
		return nil
	}
	c.begun = true
	return c.record(ctx, image.Failure{State: image.FailureUnfinished})
}

// record writes the failure record of the name.
func (c *conversion) record(ctx context.Context, f image.Failure) error {
	f.Repo, f.Tag = c.req.Name.Repo, c.req.Name.Tag
	f.Source, f.Converter, f.Time = c.req.Source, Version, c.cfg.Now()
	if c.req.Platform != (image.Platform{}) {
		f.Platform = c.req.Platform.String()
	}
	if !c.result.Source.IsZero() {
		f.Digest = &c.result.Source
	}
	b, err := image.EncodeFailure(f)
	if err != nil {
		return err
	}
	return c.putObject(ctx, c.failureKey(), b)
}

// end keeps the reason of a failure, or removes what an earlier one left. The
// record is an aid: not being able to write it changes no result.
func (c *conversion) end(ctx context.Context, failure error) {
	if c.req.Name.Repo == "" || failure == nil && !c.begun && !c.doubted {
		return
	}
	gone := ctx.Err() != nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	var err error
	if failure == nil {
		err = c.cfg.Bucket.Delete(ctx, c.failureKey())
	} else {
		blame := image.BlameStore
		switch {
		case gone:
			blame = image.BlameCaller
		case errors.Is(failure, oci.ErrUnavailable):
			blame = image.BlameSource
		case errors.As(failure, new(*InputError)):
			blame = image.BlameInput
		}
		err = c.record(ctx, image.Failure{State: image.FailureFailed, Reason: failure.Error(), Blame: blame})
	}
	if err != nil {
		c.cfg.Log.WarnContext(ctx, "failure record not written", "name", c.req.Name.String(), "error", err)
	}
}
