#!/bin/busybox sh
# First process of a lab machine: this host's root read-only below a memory overlay, the lab's own
# directory at /lab, then /lab/NAME/agent.sh.
B=/bin/busybox
$B mount -t proc proc /proc; $B mount -t sysfs sys /sys; $B mount -t devtmpfs dev /dev
while read m; do $B insmod $m || echo "insmod $m failed"; done </modules
$B mkdir -p /low /rw /new
O=trans=virtio,version=9p2000.L,msize=512000
$B mount -t 9p -o ro,cache=loose,$O host /low &&
    $B mount -t tmpfs -o size=60% tmpfs /rw && $B mkdir /rw/u /rw/w &&
    $B mount -t overlay -o lowerdir=/low,upperdir=/rw/u,workdir=/rw/w overlay /new ||
    { echo "the lab machine has no root"; echo o >/proc/sysrq-trigger; $B sleep 9; }
for d in proc sys dev; do $B mount --move /$d /new/$d; done
$B ln -sf /proc/self/fd /new/dev/fd
$B mkdir -p /new/dev/pts /new/dev/shm /new/lab /new/lib/modules
$B mount -t devpts devpts /new/dev/pts
$B mount -t tmpfs shm /new/dev/shm
$B mount -t tmpfs run /new/run
$B mount -t 9p -o cache=none,$O lab /new/lab
NAME=$($B sed -n 's/.*lab=\([^ ]*\).*/\1/p' /new/proc/cmdline)
$B mount -t 9p -o ro,cache=loose,$O kernel /new/mnt && $B ln -s /mnt/$($B uname -r) /new/lib/modules/
# The first process itself has to switch: the kernel looks for modules in its root.
exec $B switch_root /new /bin/bash /lab/$NAME/agent.sh
