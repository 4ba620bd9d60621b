# What becomes of the memory of paused sandboxes, with version 2 of control groups and swap
# on zram. Told after sandboxes.sh.
echo 256M >/sys/block/zram0/disksize
busybox mkswap /dev/zram0 >/dev/null
busybox swapon /dev/zram0
serving
worker --paused-memory reclaim --memory-low 96M --memory-high 128M
swapped() { [ $(own memory.swap.current $1) -gt $2 ]; }
taken() { wget -q -O - http://127.0.0.1:7081/metrics | sed -n 's/^quarry_paused_memory_taken_bytes_total{how="swap"} //p'; }

A=$(quarry create -e PATH=/bin --mem 192M --idle-pause 1s t/one)
quarry exec $A busybox dd if=/dev/urandom of=/dev/shm/data bs=1M count=48 2>/dev/null
SUM=$(quarry exec $A busybox sha256sum /dev/shm/data)
await 60 is paused $A
story "an idle sandbox is paused"

echo 320M >/sys/fs/cgroup/$GROUP/memory.max
B=$(quarry create -e PATH=/bin --mem 256M t/one)
quarry exec $B busybox dd if=/dev/zero of=/dev/shm/data bs=1M count=160 2>/dev/null
await 60 swapped $A 30000000
is paused $A || fail "it is paused no more"
echo "figure: taken of a paused sandbox: $(own memory.swap.current $A) bytes of swap, $(taken) as the worker counts"
story "the memory of a paused sandbox serves another one"

workerKilled
worker --paused-memory reclaim --memory-low 96M --memory-high 128M
swapped $A 30000000 || fail "the next worker gives back what it cannot know is wanted"
quarry rm $B >/dev/null
[ "$(quarry exec $A busybox sha256sum /dev/shm/data)" = "$SUM" ] || fail "its memory came back as another"
[ "$(own memory.swap.max $A)" = 0 ] || fail "left of a reclaim: memory.swap.max $(own memory.swap.max $A)"
story "it is right when it is back"

call $A/pause
call $A/resume
[ "$(quarry exec $A busybox echo here)" = here ] || fail "it does not run"
quarry rm $A >/dev/null
await 30 noneLeft $A
workerEnds
served
busybox swapoff /dev/zram0
story "waits: nothing is left"
