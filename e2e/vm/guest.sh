# Run in a guest after a line that sets CHECKS, words of NAME:FORM:DIGEST: an image,
# the form of device that the kernel takes, and the digest that the signed statement
# names.
set -eu
seconds() { cut -d. -f1 /proc/uptime; }
step() { echo "step: $* ($(seconds) s after boot)"; }

# attach FILE: binds a free loop device to it and names it.
attach() {
	local dev
	dev=$(losetup -f)
	losetup -r "$dev" "$1"
	echo "$dev"
}

# check NAME FORM DIGEST: mounts an image and compares its tree.
check() {
	local options=ro boot data= got
	mkdir -p /mnt/image
	if [ "$2" = split ]; then
		boot=$(attach /host/$1.boot)
		data=$(attach /host/$1.data)
		options=ro,device=$data
	else
		boot=$(attach /host/$1.flat)
	fi
	mount -t erofs -o $options $boot /mnt/image
	got=$(quarry treedigest /mnt/image)
	umount /mnt/image
	losetup -d $boot
	if [ -n "$data" ]; then losetup -d $data; fi
	if [ "$got" != "$3" ]; then
		echo "$1 as $2: the mount has tree digest $got, the statement says $3"
		exit 1
	fi
	step "$1 as $2: $got"
}
for c in $CHECKS; do
	name=${c%%:*}
	c=${c#*:}
	check $name ${c%%:*} ${c#*:}
done

# The worker's own way: FUSE, loop devices, EROFS, and runsc on it.
odd=${CHECKS#odd:*:}
odd=${odd%% *}
cp -a /host/odd.store /tmp/store
export QUARRY_DATA=/tmp/store QUARRY_WORKER=/tmp/worker
mkdir /mnt/worker
quarry mount t/odd /mnt/worker
got=$(quarry treedigest /mnt/worker)
quarry umount /mnt/worker
if [ "$got" != "$odd" ]; then
	echo "quarry mount: the mount has tree digest $got, the statement says $odd"
	exit 1
fi
step "quarry mount: $got"
status=0
quarry run -e PATH=/bin t/odd sh -c 'busybox cat /hello; busybox uname -a; echo new > /new && exit 7' >/tmp/out 2>/tmp/err || status=$?
cat /tmp/out /tmp/err
if [ $status != 7 ] || ! grep -q '^hello from the image$' /tmp/out; then
	echo "quarry run: exit status $status, want 7 and the image's greeting"
	for log in /tmp/worker/*.log /tmp/worker/mounts/*/*.log; do [ ! -e $log ] || tail -n 20 $log; done
	exit 1
fi
step "quarry run"
if grep -q /tmp/worker /proc/mounts || ls /tmp/worker/sandboxes | grep -q .; then
	echo "left behind:"
	cat /proc/mounts
	exit 1
fi
