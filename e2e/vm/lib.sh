# What stories have in common. Run as root, after lines that set:
#   ATTACH   the attach mode: nbd or fuse
#   WORK     an empty folder to work in
#   STORE    a data folder with the images t/one and t/two
#   ONE TWO  the tree digests that their signed statements name
# with quarry, quarry-shim and runsc on the PATH. busybox's sh and tools are enough.
set -eu
export QUARRY_DATA= QUARRY_WORKER=$WORK/worker QUARRY_ATTACH=$ATTACH
export QUARRY_STORE=http://127.0.0.1:7071 QUARRY_TRUST=$STORE/keys
M1=$WORK/m1 M2=$WORK/m2
mkdir -p $M1 $M2

now() { cut -d' ' -f1 /proc/uptime; }
since() { awk -v from=$1 -v to=$(now) 'BEGIN { printf "%.2f s", to - from }'; }
fail() {
	echo "story failed: $*"
	for log in $WORK/*.log $WORK/worker/*.log $WORK/worker/mounts/*/*.log; do
		[ ! -e $log ] || { echo "== $log"; tail -n 15 $log; }
	done
	ps | grep -v '\[' | tail -n 40
	cat /proc/mounts
	exit 1
}
story() { echo "story: $* ($(now) s after boot)"; }

# await SECONDS COMMAND...: waits until the command succeeds. The seconds only end a
# hang.
await() {
	local left=$(($1 * 20))
	shift
	until "$@"; do
		left=$((left - 1))
		[ $left -gt 0 ] || fail "waited in vain for: $*"
		sleep 0.05
	done
}
killed() { [ $# = 0 ] || kill -9 $* 2>/dev/null || true; }
digest() { quarry treedigest $1; }
# cold makes the next reads go to the device.
cold() { echo 3 >/proc/sys/vm/drop_caches; }
same() {
	local got
	cold
	got=$(digest $1) || fail "$1 cannot be read"
	[ "$got" = $2 ] || fail "$1 has tree digest $got, the statement says $2"
}
# field NAME FOLDER: a field of a shim's record.
field() { sed -n "s/^ *\"$1\": *\"\{0,1\}\([^\",]*\)\"\{0,1\},\{0,1\}$/\1/p" $2/shim.json; }
# folder ID: of the image's mount.
folder() { echo $QUARRY_WORKER/mounts/$1; }
# processes COMMAND: quarry's background processes for the worker, by their
# arguments, which the shell reads without the zeroes between them.
processes() {
	local p args
	for p in /proc/[0-9]*; do
		args=
		{ IFS= read -r args <$p/cmdline; } 2>/dev/null || true
		case $args in
		*quarry$1--worker-dir$QUARRY_WORKER*) echo ${p#/proc/} ;;
		esac
	done
}
readers() { processes reader; }
keepers() { processes keeper; }
# free DEVICE: the device is bound to nothing.
free() {
	case $1 in
	/dev/nbd*) [ ! -e /sys/block/${1#/dev/}/pid ] ;;
	*) [ ! -e /sys/block/${1#/dev/}/loop/backing_file ] ;;
	esac
}
# nothing is stuck below the mounts.
noneStuck() { ! grep -l '^State:.D' /proc/[0-9]*/status 2>/dev/null | grep -q .; }
# readEIO FILE: reading the file ends with EIO.
readEIO() {
	cold
	! cat "$1" >/dev/null 2>$WORK/read.err || fail "$1 can be read"
	grep -qi 'i/o error\|input/output' $WORK/read.err || fail "reading $1: $(cat $WORK/read.err), want EIO"
}
# stalledReads FOLDER N: stops the reader and has N processes wait for it, each for
# another file; each adds a line to $WORK/reads when it ends.
stalledReads() {
	local n=0
	: >$WORK/reads
	cold
	ls -lR $1 >/dev/null # so that they wait for the files themselves
	kill -STOP $(readers)
	for f in $1/many/1*; do
		[ $n -lt $2 ] || break
		n=$((n + 1))
		{
			if cat "$f" >/dev/null 2>$WORK/stalled.$n; then echo read; else tail -n 1 $WORK/stalled.$n; fi >>$WORK/reads
		} &
	done
	sleep 0.5
}
readsEnded() { [ $(wc -l <$WORK/reads) -ge $1 ]; }
allEIO() { [ $(grep -ci 'i/o error\|input/output' $WORK/reads) = $1 ] || fail "stalled reads ended with: $(sort $WORK/reads | uniq -c), want $1 times EIO"; }

# serving: starts a store node of STORE, which ends with served.
serving() {
	: >$WORK/serve.log
	quarry serve --data $STORE --no-auth --listen 127.0.0.1:7071 >>$WORK/serve.log 2>&1 &
	SERVE=$!
	await 30 grep -q listening $WORK/serve.log
}
served() {
	kill -TERM $SERVE
	wait $SERVE || fail "serve does not end well"
}
