#!/bin/sh
# The initiator's side of iSER: makes a disk at the target, tgtd, and reads and writes it.
#
# iser.sh iser|iscsi PORT SECONDS.  Of tgtd's transports, iser admits an initiator only whose address
# and whose name are both bound to the target.  tgtd ignores signals; it ends when it is told to.
set -eu
transport=$1 port=$2 seconds=$3
target=iqn.2026-01.example:disk initiator=iqn.2026-01.example:initiator
disk=$(mktemp)
trap 'rm -f "$disk"' EXIT
truncate -s 64M "$disk"
tgt() { tgtadm --lld "$transport" --mode "$@" --tid 1; }
tgt target --op new --targetname $target
tgt logicalunit --op new --lun 1 --backing-store "$disk"
tgt target --op bind --initiator-address ALL
tgt target --op bind --initiator-name $initiator
url=$transport://127.0.0.1:$port/$target/1
iscsi-test-cu --dataloss --initiator-name=$initiator \
	--test=SCSI.Write10.Simple,SCSI.Read10.Simple "$url" 2>&1 | tail -n 12
iscsi-perf -i $initiator -b 128 -m 8 -t "$seconds" "$url" | tr '\r' '\n' | tail -n 5
# Not before the last session has gone (its --force calls a function that iser has not).
until tgt target --op delete 2>/dev/null; do sleep 0.1; done
tgtadm --mode sys --op delete
