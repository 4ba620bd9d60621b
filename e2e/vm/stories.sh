# What an attached image does when something dies, as a user sees it. Told after lib.sh.
serving
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
grep -q '^THP_enabled:.*0$' /proc/$SHIM/status || fail "the shim has huge pages: $(grep AnonHuge /proc/$SHIM/smaps_rollup)"
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
served
