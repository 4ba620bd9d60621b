# A sandbox that is put to disk and comes back, with version 2 of control groups. Told
# after workers.sh.
# The worker's folder is on a disk: what lies on tmpfs is memory, and the sandbox's own.
echo 512M >/sys/block/zram0/disksize
/host/tools/mkfs.ext4 -q -O ^has_journal /dev/zram0
mkdir $WORK/disk
mount -t ext4 /dev/zram0 $WORK/disk
SW=$WORK/disk/w
mkdir -m 700 $SW
export QUARRY_WORKER=$SW
serving
worker
# answer ID/WHAT: what the worker says to a call, its refusals too.
mkfifo $WORK/ask
answer() {
	nc 127.0.0.1 7081 <$WORK/ask >$WORK/answer &
	exec 3>$WORK/ask # and open until there is the answer
	printf 'POST /v1/sandboxes/%s HTTP/1.0\r\nContent-Length: 0\r\n\r\n' $1 >&3
	wait $! || true
	exec 3>&-
	cat $WORK/answer
}
sentryOf() {
	local p
	for p in $(grep -l "^runsc-sandbox" /proc/[0-9]*/cmdline 2>/dev/null); do
		! grep -q "$SW/node/$1" $p 2>/dev/null || echo $p | cut -d/ -f3
	done
}
# counts: how far its first process has come; it says each number once.
counts() { wc -l <$SW/node/$H/init/stdout; }
countsOn() { [ $(counts) -gt $1 ]; }

DATA=$((12 << 20))
H=$(quarry create -e PATH=/bin --mem 96M --pids 100 t/one sh -c 'busybox mkfifo /wait; exec 3<>/wait; i=0; while :; do i=$((i + 1)); echo $i; read -t 1 x <&3; done')
quarry exec $H sh -c 'busybox dd if=/dev/urandom of=/dev/shm/data bs=1M count=12; busybox dd if=/dev/urandom of=/kept bs=64k count=4; busybox rm /size-1' 2>/dev/null
look() { quarry exec $H sh -c 'busybox md5sum /dev/shm/data /kept; busybox cat /hello; test -e /size-1 || echo removed'; }
SAW=$(look)
await 60 countsOn 1
held=$(own memory.current $H)
[ $held -gt $DATA ] || fail "it holds $held bytes, and $DATA are its data"

quarry exec --role agent --id waits -d $H sh -c 'echo $$ >/pid; exec busybox sleep 1000'
answer $H/hibernate | grep -q 'not_hibernated.*a restore would kill' || fail "a command runs, and a hibernation says: $(cat $WORK/answer)"
is running $H || fail "a hibernation that was refused leaves it: $(quarry ps)"
[ "$(look)" = "$SAW" ] || fail "after a hibernation that was refused: $(look)"
quarry exec $H sh -c 'kill -9 $(busybox cat /pid)'
quarry logs --follow $H waits || true # until it has ended
story "a hibernation that would kill a command is refused"

limits() { for f in memory.max memory.swap.max memory.oom.group pids.max cpu.max; do echo "$f: $(own $f $H)"; done; }
LIMITS=$(limits)
[ "$(own memory.max $H) $(own memory.swap.max $H)" = "100663296 0" ] || fail "its limits: $LIMITS"
# allAway: of its memory nothing is left, but pages of files that were read.
allAway() { [ "$(own memory.stat $H | grep -c '^anon 0$\|^shmem 0$')" = 2 ] && [ $(own memory.current $H) -lt $DATA ]; }
# asleep puts it to disk, where all of it is then.
asleep() {
	from=$(now)
	call $H/hibernate
	echo "figure: put to disk: $(since $from), $(du -k $SW/node/$H/hibernated | cut -f1) KiB"
	is hibernated $H || fail "it is: $(quarry ps)"
	[ -z "$(sentryOf $H)" ] || fail "its Sentry runs"
	[ -z "$(own cgroup.procs $H)" ] || fail "processes in its group: $(own cgroup.procs $H)"
	await 30 allAway
	echo "figure: its group has $(own memory.current $H) bytes of memory, it had $held"
}
# awake looks at one that runs again: it is right, it has gone on, and its limits hold.
awake() {
	is running $H || fail "it is: $(quarry ps)"
	[ ! -e $SW/node/$H/hibernated ] || fail "the files of its hibernation are still there"
	own cgroup.procs $H | grep -q "^$(sentryOf $H)$" || fail "its Sentry $(sentryOf $H) is not in its group: $(own cgroup.procs $H)"
	[ "$(limits)" = "$LIMITS" ] || fail "its limits: $(limits), before $LIMITS"
	[ "$(look)" = "$SAW" ] || fail "what it holds is another: $(look), before $SAW"
	[ $(own memory.current $H) -gt $DATA ] || fail "its group has $(own memory.current $H) bytes"
	n=$(counts)
	await 60 countsOn $n
	cp $SW/node/$H/init/stdout $WORK/counted
	seq $(wc -l <$WORK/counted) | cmp - $WORK/counted || fail "its first process has counted: $(cat $WORK/counted)"
}
asleep
n=$(counts)
from=$(now)
call $H/wake
echo "figure: woken: $(since $from)"
awake
story "a sandbox is put to disk and woken"

asleep
workerKilled
worker
is hibernated $H || fail "the next worker finds it: $(quarry ps)"
call $H/wake
awake
story "the next worker wakes it"

# Its memory is still counted in its group: less than it has there is its end.
echo 8M >$(echo /sys/fs/cgroup/$GROUP/*/$H)/memory.max
await 60 gone $H "oom_guest_limit agent"
await 30 noneLeft $H
workerEnds
! grep -q $SW/mounts /proc/mounts || fail "left mounted: $(grep $SW /proc/mounts)"
story "hibernated: nothing is left"
served
