#!/bin/sh
# Makes a base for cluster/Dockerfile from Debian's packages alone, where no registry of images is reached. Needs root,
# debootstrap and buildah (apt-get install debootstrap buildah).
#   sh cluster/image/base.sh corral-base
#   buildah build --isolation chroot --format docker --build-arg BASE=localhost/corral-base -f cluster/Dockerfile -t corral .
# Isolation by chroot wants no privileges of the kernel; --format docker keeps the health check.
set -eu
name=${1:?the name of the image}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates trixie "$folder/root"
rm -rf "$folder"/root/var/cache/apt/archives/*.deb "$folder"/root/var/lib/apt/lists/*
container=$(buildah from scratch)
buildah add --quiet "$container" "$folder/root" / > /dev/null
buildah config --cmd bash "$container"
buildah commit --quiet --rm "$container" "localhost/$name"
