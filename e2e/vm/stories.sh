# What an attached image does when something dies, as a user sees it. Run as root,
# after lines that set:
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

: >$WORK/serve.log
quarry serve --data $STORE --no-auth --listen 127.0.0.1:7071 >>$WORK/serve.log 2>&1 &
SERVE=$!
await 30 grep -q listening $WORK/serve.log
quarry doctor >$WORK/doctor || true
grep -q 'kernel NBD' $WORK/doctor || fail "doctor says nothing of NBD: $(cat $WORK/doctor)"
grep 'kernel NBD' $WORK/doctor

# The worker's path: mount, read all and compare.
from=$(now)
quarry mount t/one $M1
echo "figure: mount of an image never seen, through $ATTACH: $(since $from)"
same $M1 $ONE
DIR1=$(ls -d $QUARRY_WORKER/mounts/*/)
DIR1=${DIR1%/}
quarry umount $M1
from=$(now)
quarry mount t/one $M1
echo "figure: mount of an image that is here, through $ATTACH: $(since $from)"
[ $(field attach $DIR1) = $ATTACH ] || fail "attached through $(field attach $DIR1)"
DEV1=$(field device $DIR1)
quarry mount t/two $M2
same $M1 $ONE
same $M2 $TWO
story "two images mounted and compared; $DEV1"

status=0
quarry run -e PATH=/bin t/one sh -c 'busybox cat /hello; echo new >/new && exit 7' >$WORK/out 2>$WORK/err || status=$?
[ $status = 7 ] && grep -q '^hello from the image$' $WORK/out || fail "quarry run: exit status $status, $(cat $WORK/out $WORK/err)"
story "quarry run"

# Two workers attach at the same moment.
for w in a b; do
	mkdir $WORK/at.$w
	QUARRY_WORKER=$WORK/other.$w quarry mount t/one $WORK/at.$w &
	eval P$w=$!
done
wait $Pa || fail "the first of two workers cannot mount"
wait $Pb || fail "the second of two workers cannot mount"
for w in a b; do
	same $WORK/at.$w $ONE
	QUARRY_WORKER=$WORK/other.$w quarry umount $WORK/at.$w
done
story "two workers at once"

# The reader is killed again and again under verified reading.
from=$(now)
killed $(readers)
cold
cat $M1/size-1 >/dev/null || fail "a read after the reader was killed"
restart=$(awk -v from=$from -v to=$(now) 'BEGIN { print to - from }')
interval=$(awk -v r=$restart 'BEGIN { print 5 * r }')
: >$WORK/trees
touch $WORK/reading
(
	while [ -e $WORK/reading ]; do
		cold
		from=$(now)
		echo "$(digest $M1) $(since $from)" >>$WORK/trees
	done
) &
LOOP=$!
for _ in 1 2 3; do
	sleep $interval
	killed $(readers)
done
rm $WORK/reading
wait $LOOP
[ $(wc -l <$WORK/trees) -gt 0 ] && ! grep -v "^$ONE " $WORK/trees || fail "reading while the reader was killed: $(cat $WORK/trees)"
echo "figure: reading it all took $(cut -d' ' -f2- $WORK/trees | sort -n | sed -n '1p;$p' | tr '\n' ' ')with the reader killed every $interval s"
story "reader killed 3 times under reading"

# A hundred stalled reads hold up no other and hold little memory.
killed $(keepers)
SHIM=$(field pid $DIR1)
stalledReads $M1 100
anon=$(sed -n 's/^RssAnon:[ \t]*\([0-9]*\) kB/\1/p' /proc/$SHIM/status)
echo "figure: a shim with stalled reads holds $anon kB of anonymous memory"
[ $anon -le 8192 ] || fail "the shim holds $anon kB of anonymous memory, want 8192 or less"
kill -CONT $(readers)
await 120 readsEnded 100
[ "$(sort -u $WORK/reads)" = read ] || fail "reads that were held up: $(sort $WORK/reads | uniq -c)"
story "a hundred stalled reads"

# The reader is gone for good: EIO within the deadline, nothing stuck, and the
# other images as before. A shim with a short deadline, beside the worker's own.
mkdir -m 700 $WORK/short
: >$WORK/short.out
quarry-shim --attach $ATTACH --socket $(field socket $DIR1) --export $(field export $DIR1) --size $(field size $DIR1) \
	--data-offset $(tr '\000' ' ' </proc/$SHIM/cmdline | sed -n 's/.*--data-offset \([0-9]*\).*/\1/p') \
	--dir $WORK/short --deadline 3s >>$WORK/short.out 2>$WORK/short.log &
SHORT=$!
await 60 grep -q ready $WORK/short.out
killed $(keepers)
killed $(readers)
readEIO $WORK/short/root/size-1
readEIO $WORK/short/root/size-4097
await 10 noneStuck
kill -TERM $SHORT
wait $SHORT || fail "the shim without a reader does not end well"
! grep -q $WORK/short /proc/mounts || fail "the shim without a reader leaves a mount"
quarry mount t/two $WORK/at.a # the next command starts what is missing
quarry umount $WORK/at.a
same $M1 $ONE
story "reader gone for good"

# The shim is killed under reading: EIO as soon as the keeper has swept; umount
# works, the other image is unharmed, the device is free and serves other content.
stalledReads $M1 20
killed $(field pid $DIR1)
await 30 readsEnded 20
allEIO 20
await 10 noneStuck
kill -CONT $(readers)
readEIO $M1/size-1
quarry umount $M1
await 30 free $DEV1
same $M2 $TWO
quarry mount t/two $M1
same $M1 $TWO
quarry umount $M1
quarry mount t/one $M1
same $M1 $ONE
story "shim killed with a keeper"

# The same without a keeper: the next command sweeps.
DEV1=$(field device $DIR1)
killed $(keepers)
stalledReads $M1 20
killed $(field pid $DIR1)
kill -CONT $(readers)
mkdir -p $WORK/at.c
quarry mount t/one $WORK/at.c
await 30 readsEnded 20
allEIO 20
same $WORK/at.c $ONE
umount $M1
await 30 free $DEV1
quarry umount $WORK/at.c
story "shim and keeper killed"

# Everything is killed, and nobody reads: the next start reclaims what is left.
quarry mount t/one $M1
DEV1=$(field device $DIR1)
killed $(keepers) $(readers) $(field pid $DIR1)
umount $M1
from=$(now)
quarry mount t/one $M1
echo "figure: mount after everything was killed, through $ATTACH: $(since $from)"
same $M1 $ONE
same $M2 $TWO
quarry umount $M1
quarry umount $M2
story "everything killed, and reclaimed"

await 30 test -z "$(ls $QUARRY_WORKER/mounts | grep -v lock)"
! grep -q $WORK /proc/mounts || fail "mounts are left"
for d in /sys/block/nbd*; do
	[ ! -e $d/pid ] || fail "$d is left, of $(cat $d/backend)"
done
kill -TERM $SERVE
wait $SERVE || fail "serve does not end well"
