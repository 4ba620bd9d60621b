// Package s3 keeps a bucket and its journal in S3 or a server that speaks its
// protocol. The servers are believed little: a write counts once the server was
// asked for it again, and what cannot be told from a fault is an error.
package s3

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net"
	"sync/atomic"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go/logging"

	"quarry/store/bucket"
)

const (
	// partSize is the size of one part of a large object, and what is small enough
	// to be sent whole: four parts for a pack of 64 MiB, and 160 GB in the 10 000
	// parts that S3 allows; parts of larger objects are larger.
	partSize = 16 << 20
	maxParts = 10000
	// partsAtOnce bounds the requests of one Put. Parts are read while they are
	// sent, so they cost no memory but the connection's.
	partsAtOnce = 4
	// attemptTimeout bounds one request, and slowest is the rate in bytes a second
	// at which a body may take longer: 16 MiB have half a minute.
	attemptTimeout = 15 * time.Second
	slowest        = 1 << 20
	dialTimeout    = 5 * time.Second
	maxIdleConns   = 128
	// putLocks spreads the keys over this many locks; see Bucket.puts.
	putLocks = 256
)

// Config says which bucket to open, and how patient to be. Zero values mean the
// defaults of the constants above.
type Config struct {
	Location Location
	// UnsafeSingleWriter takes a server that ignores conditional writes. Nothing
	// but this process may then write the journal, ever.
	UnsafeSingleWriter bool
	AttemptTimeout     time.Duration
	Backoff            time.Duration // the first pause between two attempts
	PartSize           int64
	Slowest            int64 // bytes a second
}

// Bucket is a bucket.Bucket and a bucket.Journal:
//
//	<prefix>/<key>              an object
//	<prefix>/log/<n, 20 digits> journal entry n
//	<prefix>/tmp/               what Probe writes and removes
type Bucket struct {
	cfg    Config
	client *awss3.Client
	http   *awshttp.BuildableClient
	pace   pace
	known  atomic.Uint64 // a journal entry that exists, so all before it do
	// puts hold one token each. Two puts of one key follow one another, else
	// neither could tell whether the object that the server has is its own.
	puts [putLocks]chan struct{}
	seed maphash.Seed

	metrics *metrics
}

var (
	_ bucket.Bucket  = (*Bucket)(nil)
	_ bucket.Journal = (*Bucket)(nil)
)

// Open connects to a bucket, with the credentials that the AWS SDK finds in the
// environment, its files, or the machine's role. It writes nothing: see Probe.
func Open(ctx context.Context, cfg Config) (*Bucket, error) {
	if cfg.AttemptTimeout == 0 {
		cfg.AttemptTimeout = attemptTimeout
	}
	if cfg.Backoff == 0 {
		cfg.Backoff = firstPause
	}
	if cfg.PartSize == 0 {
		cfg.PartSize = partSize
	}
	if cfg.Slowest == 0 {
		cfg.Slowest = slowest
	}
	b := &Bucket{cfg: cfg, seed: maphash.MakeSeed(), metrics: newMetrics()}
	for i := range b.puts {
		b.puts[i] = make(chan struct{}, 1)
	}
	loc := cfg.Location
	b.http = awshttp.NewBuildableClient().
		WithDialerOptions(func(d *net.Dialer) { d.Timeout = dialTimeout }).
		WithTransportOptions(func(t *httpTransport) { t.MaxIdleConns, t.MaxIdleConnsPerHost = maxIdleConns, maxIdleConns })
	opts := []func(*config.LoadOptions) error{config.WithHTTPClient(b.http)}
	if loc.Region != "" {
		opts = append(opts, config.WithRegion(loc.Region))
	} else if loc.Endpoint != "" {
		opts = append(opts, config.WithDefaultRegion(defaultRegion))
	}
	sdk, err := config.LoadDefaultConfig(ctx, opts...)
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", loc, err)
	}
	if sdk.Region == "" {
		return nil, fmt.Errorf("open bucket %s: no region: say ?region=… in the URL, or set AWS_REGION", loc)
	}
	if _, err := sdk.Credentials.Retrieve(ctx); err != nil {
		return nil, fmt.Errorf("open bucket %s: no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, for the process that serves: %w", loc, err)
	}
	b.client = awss3.NewFromConfig(sdk, func(o *awss3.Options) {
		if loc.Endpoint != "" {
			o.BaseEndpoint, o.UsePathStyle = aws.String(loc.Endpoint), true
		}
		o.HTTPClient = counting{o.HTTPClient, b.metrics}
		o.Logger = logging.Nop{}
		o.Retryer = aws.NopRetryer{} // bodies are read after its attempts: see retry
		o.RequestChecksumCalculation = aws.RequestChecksumCalculationWhenRequired
		o.ResponseChecksumValidation = aws.ResponseChecksumValidationWhenRequired
	})
	err = b.retry(ctx, 0, func(ctx context.Context) error {
		_, err := b.client.HeadBucket(ctx, &awss3.HeadBucketInput{Bucket: &loc.Bucket})
		switch statusOf(err) {
		case 404:
			err = final{errors.New("there is no such bucket: make it, or mend the URL")}
		case 401, 403:
			err = final{fmt.Errorf("the server refuses the credentials of this process (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or a profile or role): mend them, or what they may do: %w", err)}
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", loc, err)
	}
	return b, nil
}

// Close drops idle connections; no other method may be called after it.
func (b *Bucket) Close() error {
	b.http.GetTransport().CloseIdleConnections()
	return nil
}

// object returns where S3 has a key of ours.
func (b *Bucket) object(key string) *string {
	return aws.String(b.cfg.Location.prefix() + key)
}

// lockKey waits until no other Put or Delete of key is under way.
func (b *Bucket) lockKey(ctx context.Context, key string) (unlock func(), err error) {
	lock := b.puts[maphash.String(b.seed, key)%putLocks]
	select {
	case lock <- struct{}{}:
		return func() { <-lock }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
