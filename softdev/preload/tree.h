/* The device's files in /sys and /dev, one per line, for the first device. Another device has its
 * number in each name: embedded1 and uverbs1001.
 *
 * There is no include guard, because preload/lookup.c expands this list, and tree.py reads its
 * lines. A path is a directory if another path begins with it. # stands for an index.
 *
 *   LINK(path, target)    a symbolic link, relative to its directory as in sysfs
 *   NODE(path, minor)     a device node
 *   TEXT(path, answer)    a file, whose text a function of answers.c generates when it is opened
 *
 * Programs that read it, as of 2026:
 *
 *   UCX            the node by stat and access; device/local_cpus, device/numa_node, gid_attrs/types,
 *                  gid_attrs/ndevs
 *   libfabric      ibv_device.ibdev_path, by ibv_read_sysfs_file
 *   NCCL           dlopen and dlvsym; realpath of device; gid_attrs/types
 *   Mooncake       realpath of embedded0/../.. and numa_node there; gid_attrs/ndevs
 *   rdma-core      (its tests) a listing of device/net; pkeys
 *   perftest       device/numa_node; ports/1/counters, which does not exist
 *   hwloc          a listing of the class through a descriptor of / (not supported); device/local_cpus
 */
LINK("/sys/class/infiniband/embedded0",
     "../../devices/virtual/aiordma/embedded0/infiniband/embedded0")
LINK("/sys/class/infiniband_verbs/uverbs1000",
     "../../devices/virtual/aiordma/embedded0/infiniband_verbs/uverbs1000")
TEXT("/sys/class/infiniband_verbs/abi_version", verbs_abi)
NODE("/dev/infiniband/uverbs1000", NODE_MINOR)
NODE("/dev/infiniband/rdma_cm", CM_MINOR)
LINK(DEVICE "/net/lo", "../../../net/lo")
TEXT(DEVICE "/local_cpulist", cpu_list)
TEXT(DEVICE "/local_cpus", cpu_mask)
TEXT(DEVICE "/numa_node", numa_node)
LINK(DEVICE "/infiniband_verbs/uverbs1000/device", "../../../embedded0")
LINK(DEVICE "/infiniband_verbs/uverbs1000/subsystem", "../../../../../../class/infiniband_verbs")
TEXT(DEVICE "/infiniband_verbs/uverbs1000/abi_version", driver_abi)
TEXT(DEVICE "/infiniband_verbs/uverbs1000/dev", node_number)
TEXT(DEVICE "/infiniband_verbs/uverbs1000/ibdev", name)
LINK(DEVICE "/infiniband/embedded0/device", "../../../embedded0")
LINK(DEVICE "/infiniband/embedded0/subsystem", "../../../../../../class/infiniband")
TEXT(DEVICE "/infiniband/embedded0/fw_ver", fw_ver)
TEXT(DEVICE "/infiniband/embedded0/hca_type", hca_type)
TEXT(DEVICE "/infiniband/embedded0/node_desc", name)
TEXT(DEVICE "/infiniband/embedded0/node_guid", guid)
TEXT(DEVICE "/infiniband/embedded0/node_type", node_type)
TEXT(DEVICE "/infiniband/embedded0/sys_image_guid", guid)
TEXT(DEVICE "/infiniband/embedded0/ports/1/cap_mask", cap_mask)
TEXT(DEVICE "/infiniband/embedded0/ports/1/lid", lid)
TEXT(DEVICE "/infiniband/embedded0/ports/1/lid_mask_count", zero)
TEXT(DEVICE "/infiniband/embedded0/ports/1/link_layer", link_layer)
TEXT(DEVICE "/infiniband/embedded0/ports/1/phys_state", phys_state)
TEXT(DEVICE "/infiniband/embedded0/ports/1/rate", rate)
TEXT(DEVICE "/infiniband/embedded0/ports/1/sm_lid", zero_hex)
TEXT(DEVICE "/infiniband/embedded0/ports/1/sm_sl", zero)
TEXT(DEVICE "/infiniband/embedded0/ports/1/state", state)
TEXT(DEVICE "/infiniband/embedded0/ports/1/gids/#", gid)
TEXT(DEVICE "/infiniband/embedded0/ports/1/gid_attrs/ndevs/#", gid_ndev)
TEXT(DEVICE "/infiniband/embedded0/ports/1/gid_attrs/types/#", gid_type)
TEXT(DEVICE "/infiniband/embedded0/ports/1/pkeys/0", pkey)
