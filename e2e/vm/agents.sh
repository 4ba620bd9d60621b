# Agents that wait for a model, left resident, put to disk and paused, on version 2 of
# control groups with swap. Told after hibernate.sh, whose disk it uses. Their worker has a
# network of its own, where kernels know no NBD: images come through FUSE. A guest on a busy
# machine takes long to put a sandbox to disk and to wake it: the patience only ends a hang.
bench() {
	from=$(now)
	QUARRY_ATTACH=auto quarry bench agents --agents 2 --agent-memory 8M --memory 192M --swap zram --wait-scale 0.1 --duration $1 --patience 4m \
		--arms resident,hibernate,reclaim --temp $WORK/disk --json $WORK/agents.json || fail "quarry bench agents ends with $?"
	for line in '"failures": {},' '"wrong_pages": 0,' '"live_sandboxes": 2,' '"checked": 2,'; do
		[ $(grep -cF "$line" $WORK/agents.json) = 3 ] || fail "not each arm has $line: $(cat $WORK/agents.json)"
	done
	grep -qF '"cgroup_v2": true' $WORK/agents.json || fail "control groups of another version: $(cat $WORK/agents.json)"
	echo "figure: agents measured for $1 an arm: $(since $from)"
}
# All have taken steps, and all but those that are left resident were paused.
waited() { ! grep -qF '"steps": 0,' $WORK/agents.json && [ $(grep -cF '"pauses": 0,' $WORK/agents.json) = 1 ]; }
bench 15s
waited || bench 1m # a busy machine needs longer
waited || fail "they have not waited: $(cat $WORK/agents.json)"
umount $WORK/disk
story "agents wait, in three ways"
