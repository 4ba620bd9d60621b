package lab

import (
	"context"
	"fmt"
	"path/filepath"
)

// distributionConf has distribution's registry keep its blobs in a folder, and write
// down only what goes wrong.
const distributionConf = `version: 0.1
log:
  level: error
  accesslog: {disabled: true}
storage:
  filesystem: {rootdirectory: %[1]s}
  delete: {enabled: true}
http:
  addr: %[2]s
`

// Distribution starts distribution's registry on a free loopback port, with nothing in
// it.
func (l *Lab) Distribution(ctx context.Context) (*Peer, error) {
	return l.startPeer(ctx, "registry", func(dir, conf, addr string) (string, []string) {
		return fmt.Sprintf(distributionConf, filepath.Join(dir, "root"), addr), []string{"serve", conf}
	})
}
