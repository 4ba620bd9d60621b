package cgroup

import (
	"testing"
)

func TestParse(t *testing.T) {
	events := "low 0\nhigh 3\nmax 12\noom 2\noom_kill 1\noom_group_kill 1\n"
	for key, want := range map[string]int64{"low": 0, "max": 12, "oom": 2, "oom_kill": 1, "not_there": 0} {
		if got, err := parseKey(events, key); err != nil || got != want {
			t.Errorf("%s: got %d, %v, want %d", key, got, err, want)
		}
	}
	if _, err := parseKey("oom_kill many\n", "oom_kill"); err == nil {
		t.Error("a key without a number was taken")
	}
	for text, want := range map[string]int64{"max": 0, "0": 0, "4096": 4096, "9223372036854771712": 0, "18446744073709551615": 0} {
		if got, err := parseInt(text); err != nil || got != want {
			t.Errorf("%s: got %d, %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "-1", "1 2", "x"} {
		if _, err := parseInt(text); err == nil {
			t.Errorf("%q was taken", text)
		}
	}
}

func TestMentions(t *testing.T) {
	for raw, want := range map[string]bool{
		"0::/quarry/w/abc\n":                           true,
		"0::/../quarry/w/abc/below\n":                  true,
		"9:name=systemd:/\n8:pids:/quarry/w/abc\n0::/": true,
		"0::/quarry/w/abcd\n":                          false,
		"0::/quarry/w\n":                               false,
		"":                                             false,
		"nonsense":                                     false,
	} {
		if got := mentions(raw, "/quarry/w/abc"); got != want {
			t.Errorf("%q: got %v, want %v", raw, got, want)
		}
	}
}

func TestMissing(t *testing.T) {
	if got := missing("cpu io memory", v2Controllers); len(got) != 1 || got[0] != "pids" {
		t.Errorf("got %q", got)
	}
	if !isNeeded("memory") || isNeeded("cpuset") {
		t.Error("memory is needed and cpuset is not")
	}
}

func TestQuota(t *testing.T) {
	for milli, want := range map[int64]int64{1: minQuota, 100: 10_000, 1000: 100_000, 2500: 250_000} {
		if got := quota(milli); got != want {
			t.Errorf("%d: got %d, want %d", milli, got, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("oom_kill 1\n")
	f.Add("max")
	f.Add("0::/a/b")
	f.Fuzz(func(t *testing.T, raw string) {
		parseKey(raw, "oom_kill")
		if n, err := parseInt(raw); err == nil && n < 0 {
			t.Errorf("%q is %d", raw, n)
		}
		mentions(raw, "/a/b")
	})
}
