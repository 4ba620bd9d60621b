#!/bin/busybox sh
# Sets the guest up, runs the script of the shared folder /vm and leaves its exit
# status there. Whatever ends before that leaves none.
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root
/bin/busybox mkdir -p /usr/bin /usr/sbin
/bin/busybox --install -s
fail() {
	echo "vm: $*"
	poweroff -f
}
mount -t proc proc /proc && mount -t sysfs sys /sys && mount -t devtmpfs dev /dev || fail "no proc, sysfs or devtmpfs"
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
chmod 1777 /tmp
while read -r file params; do
	insmod "/modules/$file" $params || fail "cannot load $file"
done </modules/list
ip link set lo up
hostname vm
for share in vm host; do
	mount -t 9p -o trans=virtio,version=9p2000.L,msize=524288 $share /$share || fail "cannot mount the shared folder $share"
done
cd /host
echo >/vm/begun
sh /vm/script
status=$?
cd /
echo $status >/vm/status
umount /host /vm
poweroff -f
