#!/bin/sh
# Installs stock Nydus, built from its crate, into a folder:
#   build-nydus.sh DIR    makes DIR/bin/nydusd and DIR/bin/nydus-image
# That takes about 6 minutes of processor time. What is there already is kept.
set -eu

version=2.2.0 # the newest that crates.io has with programs
dir=$1

if [ -x "$dir/bin/nydusd" ] && [ -x "$dir/bin/nydus-image" ]; then
	exit 0
fi

# cargo of rustup, or of the distribution. OpenSSL is built from source by perl
# and make, zlib-ng by cmake.
missing=
command -v cargo >/dev/null || missing="$missing cargo"
for p in cmake make perl pkg-config g++; do
	command -v "$p" >/dev/null || missing="$missing $p"
done
if [ -n "$missing" ]; then
	echo "installing$missing"
	apt-get update -qq
	# shellcheck disable=SC2086 # a list of words
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi

# --locked: the crate's own Cargo.lock of 2023 still builds; newer releases of
# what it needs may not.
cargo install nydus-rs --version "$version" --locked --root "$dir"
