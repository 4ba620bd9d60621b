#!/bin/sh
# Builds a real image: Debian 12 minbase with python3 and pip from debootstrap,
# as an OCI layout of one gzip layer, tag "latest".
#
#   debian-image.sh LAYOUT SORT [EXTRA-PACKAGE…]
#
# SORT is the tar member order: "name" or "inode". Two runs are independent
# builds: nothing but the downloaded .deb files is shared (folder
# $QUARRY_DEBS when set). $PREPARE, when set, is a script that runs in the new
# root before it becomes the layer. Needs root, debootstrap, umoci, tar, gzip.
set -eu

layout=$1 sort=$2
shift 2
packages=python3,python3-pip
for extra; do packages=$packages,$extra; done

work=$(mktemp -d "${TMPDIR:-/tmp}/quarry-debian.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM

cache=
if [ -n "${QUARRY_DEBS:-}" ]; then
	mkdir -p "$QUARRY_DEBS"
	cache=--cache-dir=$QUARRY_DEBS
fi
if ! debootstrap --variant=minbase --include="$packages" $cache bookworm "$work/root" >"$work/log" 2>&1; then
	tail -n 20 "$work/log" >&2
	echo "debian-image: debootstrap failed; it needs root and a Debian mirror" >&2
	exit 1
fi
if [ -n "${PREPARE:-}" ]; then
	# As stdin, so that the image does not hold it.
	chroot "$work/root" /bin/sh -eu <"$PREPARE" >"$work/log" 2>&1 || { tail -n 20 "$work/log" >&2; exit 1; }
fi
# Package archives and lists are not part of a task image.
rm -rf "$work/root/var/cache/apt/archives" "$work/root/var/lib/apt/lists"
mkdir -p "$work/root/var/cache/apt/archives/partial" "$work/root/var/lib/apt/lists/partial"
# debootstrap leaves its device nodes; a sandbox brings its own /dev.
find "$work/root/dev" -mindepth 1 -delete

tar --create --numeric-owner --xattrs --xattrs-include='*' --sort="$sort" \
	--format=pax --pax-option=delete=atime,delete=ctime \
	--directory="$work/root" --file="$work/layer.tar" .

rm -rf "$layout"
umoci init --layout "$layout"
umoci new --image "$layout:latest"
umoci raw add-layer --image "$layout:latest" "$work/layer.tar"
umoci config --image "$layout:latest" \
	--config.env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	--config.env LANG=C.UTF-8 --config.cmd python3
umoci gc --layout "$layout" >/dev/null
