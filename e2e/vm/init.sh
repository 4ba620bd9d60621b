#!/bin/busybox sh
# runsc does pivot_root, which the kernel refuses on the initial ramfs: the root
# becomes a tmpfs.
/bin/busybox mkdir -p /newroot
/bin/busybox mount -t tmpfs -o size=80%,mode=755 root /newroot
/bin/busybox cp -a /bin /modules /init2 /newroot/
for d in dev etc host mnt proc root run sbin sys tmp usr var vm; do
	/bin/busybox mkdir -p /newroot/$d
done
exec /bin/busybox switch_root /newroot /init2
