# What stories of sandboxes have in common. Told after lib.sh; SW is the worker's folder.
SW=$WORK/sandboxes
GROUP=quarry-story
mkdir -p $WORK/data/sub
echo given >$WORK/data/sub/file
# worker FLAGS...: starts one, and waits until it serves.
worker() {
	: >$WORK/worker.out
	quarry worker --no-auth --listen 127.0.0.1:7081 --cgroup /$GROUP --default-disk-mb 64 --share data=$WORK/data "$@" >>$WORK/worker.out 2>>$WORK/worker.log &
	WORKER=$!
	await 90 grep -q listening $WORK/worker.out
}
workerKilled() {
	kill -9 $WORKER
	wait $WORKER || true
}
workerEnds() {
	kill $WORKER
	wait $WORKER || fail "the worker ended with $?"
}
leftOf() { grep -l "$SW/node/$1" /proc/[0-9]*/cmdline 2>/dev/null; ls -d $SW/node/$1 2>/dev/null; find /sys/fs/cgroup -type d -path "*$GROUP/*$1*" 2>/dev/null; true; }
noneLeft() { [ -z "$(leftOf $1)" ]; }
endOf() { quarry ps --all --json | grep "\"id\":\"$1\"" | sed 's/.*"end":{"reason":"\([a-z_]*\)".*"blame":"\([a-z]*\)".*/\1 \2/'; }
gone() { [ "$(endOf $1)" = "$2" ]; }
# is STATE ID
is() { quarry ps | grep -q "^$2  *$1"; }
# call ID/WHAT
call() { wget -q -O /dev/null --post-data '' http://127.0.0.1:7081/v1/sandboxes/$1 || fail "$1"; }
# own FILE ID: of a sandbox's control group, where these are of version 2.
own() { cat /sys/fs/cgroup/$GROUP/*/$2/$1; }
