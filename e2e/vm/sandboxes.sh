# What a trainer sees of sandboxes when something runs out or dies. Told after workers.sh.
serving
mkdir -p -m 700 $SW
export QUARRY_WORKER=$SW QUARRY_ATTACH=$ATTACH
worker
from=$(now)
S=$(quarry create -e PATH=/bin --mem 192M --cpus 2 --pids 100 --share data/sub:/given t/one)
echo "figure: create, through $ATTACH: $(since $from)"
[ "$(quarry exec $S busybox cat /hello)" = "hello from the image" ] || fail "the sandbox does not read the image"
[ "$(quarry exec $S busybox cat /given/file)" = given ] || fail "the share is not there"
! quarry exec $S sh -c 'echo x >/given/file' 2>/dev/null || fail "a share was written to"
[ "$(quarry exec $S busybox awk '/MemTotal/ {print $2}' /proc/meminfo)" = 196608 ] || fail "MemTotal: $(quarry exec $S busybox grep MemTotal /proc/meminfo)"
[ "$(quarry exec $S busybox nproc)" = 2 ] || fail "nproc: $(quarry exec $S busybox nproc)"
story "a sandbox sees its limits and its share"

# The worker is killed while a command runs; the next one has all of its output.
quarry exec --id count -d $S sh -c 'i=0; while [ $i -lt 40 ]; do i=$((i+1)); echo line $i; busybox sleep 0.1; done; exit 5'
workerKilled
worker
status=0
quarry logs --follow $S count >$WORK/lines || status=$?
[ "$(wc -l <$WORK/lines)" = 40 ] || fail "the output has $(wc -l <$WORK/lines) lines: $(cat $WORK/lines)"
quarry logs $S | grep -q '^count .*exited  *5 ' || fail "the command's end: $(quarry logs $S)"
story "a worker that was killed has lost nothing of a command"

# Paused: it can be read, and goes on when it is resumed.
quarry exec --role agent --id tick -d $S sh -c 'while :; do busybox date +%s >>/ticks; busybox sleep 0.2; done'
await 30 quarry exec $S busybox test -s /ticks
call $S/pause
is paused $S || fail "not paused: $(quarry ps)"
quarry cp $S:/ticks $WORK/ticks1
sleep 1
quarry cp $S:/ticks $WORK/ticks2
cmp $WORK/ticks1 $WORK/ticks2 || fail "a paused sandbox runs"
is paused $S || fail "reading woke it"
workerKilled
worker
is paused $S || fail "the next worker does not know of the pause"
call $S/resume
grew() { quarry cp $S:/ticks $WORK/ticks3 && ! cmp -s $WORK/ticks2 $WORK/ticks3; }
await 30 grew
story "a paused sandbox is read, adopted and resumed"

# Out of memory: the sandbox ends and says so.
M=$(quarry create -e PATH=/bin --mem 96M t/one)
quarry exec $M busybox dd if=/dev/zero of=/dev/null bs=160M count=1 >/dev/null 2>&1 || true
await 60 gone $M "oom_guest_limit agent"
await 30 noneLeft $M
story "out of memory: $(endOf $M)"

# A fork bomb meets its limit and the machine does not notice.
P=$(quarry create -e PATH=/bin --mem 192M --pids 60 t/one)
quarry exec --timeout 5s $P sh -c 'i=0; while [ $i -lt 300 ]; do busybox sleep 30 & i=$((i+1)); done 2>/dev/null; wait' >/dev/null 2>&1 || true
[ "$(quarry exec $P busybox echo alive)" = alive ] || echo "figure: after the fork bomb: $(endOf $P)"
quarry rm $P >/dev/null
await 30 noneLeft $P
story "a fork bomb"

# The Sentry is killed under its commands.
K=$(quarry create -e PATH=/bin --mem 96M t/two)
killed $(for p in /proc/[0-9]*; do grep -q "^runsc-sandbox" $p/cmdline 2>/dev/null && grep -q "$SW/node/$K" $p/cmdline && echo ${p#/proc/}; done; true)
await 60 gone $K "runtime_crash infra"
await 30 noneLeft $K
story "the Sentry was killed: $(endOf $K)"

quarry rm $S >/dev/null
[ "$(endOf $S)" = "killed_by_user user" ] || fail "the record of a deleted sandbox: $(endOf $S)"
await 30 noneLeft $S
workerEnds
! grep -q $SW/mounts /proc/mounts || fail "left mounted: $(grep $SW /proc/mounts)"
story "sandboxes: nothing is left"
served
