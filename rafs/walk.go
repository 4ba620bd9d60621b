package rafs

// Walk calls fn for every path of the tree, directories before their entries and
// entries bytewise by name; this is the order chunks are numbered in. The root's
// path is "/", others are like "/usr/bin". A hard-linked inode comes once for
// each of its paths. The first error of fn ends the walk and is returned. The tree
// must be one that Encode accepts: a directory inside itself would not end.
func (t *Tree) Walk(fn func(path string, n *Inode) error) error {
	if err := fn("/", t.Root); err != nil {
		return err
	}
	return walkEntries("/", t.Root, fn)
}

func walkEntries(prefix string, dir *Inode, fn func(path string, n *Inode) error) error {
	for _, d := range dir.Entries {
		path := prefix + d.Name
		if err := fn(path, d.Inode); err != nil {
			return err
		}
		if d.Inode.IsDir() {
			if err := walkEntries(path+"/", d.Inode, fn); err != nil {
				return err
			}
		}
	}
	return nil
}
