#if TIERD_VERBS
#include "verbs_context.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace tierd {
namespace {

template <typename Function>
void find(void* library, const char* name, Function& out) {
    out = reinterpret_cast<Function>(dlsym(library, name));
    if (out == nullptr) throw VerbsError(std::string("libibverbs.so.1 has no ") + name + "; it is too old");
}

VerbsApi load_api() {
    void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw VerbsError(
            "no RDMA: libibverbs.so.1 is not installed; run: apt-get install ibverbs-providers");
    VerbsApi api{};
    find(library, "ibv_get_device_list", api.get_device_list);
    find(library, "ibv_free_device_list", api.free_device_list);
    find(library, "ibv_get_device_name", api.get_device_name);
    find(library, "ibv_open_device", api.open_device);
    find(library, "ibv_close_device", api.close_device);
    find(library, "ibv_query_device", api.query_device);
    find(library, "ibv_query_port", api.query_port);
    find(library, "ibv_query_gid", api.query_gid);
    find(library, "ibv_alloc_pd", api.alloc_pd);
    find(library, "ibv_dealloc_pd", api.dealloc_pd);
    find(library, "ibv_reg_mr", api.reg_mr);
    find(library, "ibv_dereg_mr", api.dereg_mr);
    find(library, "ibv_create_cq", api.create_cq);
    find(library, "ibv_destroy_cq", api.destroy_cq);
    find(library, "ibv_create_qp", api.create_qp);
    find(library, "ibv_modify_qp", api.modify_qp);
    find(library, "ibv_query_qp", api.query_qp);
    find(library, "ibv_destroy_qp", api.destroy_qp);
    find(library, "ibv_wc_status_str", api.wc_status_str);
    return api;
}

// The device list, freed in the end. VerbsError for a kernel without RDMA.
struct DeviceList {
    DeviceList() {
        errno = 0;
        list = verbs_api().get_device_list(&count);
        if (list == nullptr) throw VerbsError(explain_verbs("no RDMA: ibv_get_device_list", errno));
    }
    ~DeviceList() { verbs_api().free_device_list(list); }
    ibv_device** list = nullptr;
    int count = 0;
};

std::string port_state(ibv_port_state state) {
    switch (state) {
        case IBV_PORT_DOWN: return "down";
        case IBV_PORT_INIT: return "init";
        case IBV_PORT_ARMED: return "armed";
        case IBV_PORT_ACTIVE: return "active";
        case IBV_PORT_ACTIVE_DEFER: return "active defer";
        default: return "nop";
    }
}

std::uint32_t mtu_bytes(ibv_mtu mtu) { return 128u << static_cast<unsigned>(mtu); }

ibv_mtu mtu_of(std::uint32_t bytes) {
    const unsigned step = std::bit_width(std::clamp(bytes, 256u, 4096u)) - 8;
    return static_cast<ibv_mtu>(std::clamp(step, 1u, 5u));
}

// Why a device cannot be opened: without udev, the library's second way to the node hides what went
// wrong on the first.
int why_not_open(const ibv_device* device, int error) {
    const std::string node = std::string("/dev/infiniband/") + device->dev_name;
    return faccessat(AT_FDCWD, node.c_str(), R_OK | W_OK, AT_EACCESS) == 0 ? error : errno;
}

VerbsDevice describe(ibv_device* device) {
    const VerbsApi& api = verbs_api();
    VerbsDevice out{api.get_device_name(device), "", 0, 0, 0, 0, {}};
    errno = 0;
    ibv_context* context = api.open_device(device);
    if (context == nullptr) {
        const int why = why_not_open(device, errno);
        out.trouble = explain_verbs(out.name + ": ibv_open_device", why);
        return out;
    }
    ibv_device_attr attributes{};
    if (const int error = api.query_device(context, &attributes); error != 0)
        out.trouble = explain_verbs(out.name + ": ibv_query_device", error);
    out.region_bytes_max = attributes.max_mr_size;
    out.queue_pair_depth_max = static_cast<std::uint32_t>(attributes.max_qp_wr);
    out.read_depth_in = static_cast<std::uint32_t>(attributes.max_qp_rd_atom);
    out.read_depth_out = static_cast<std::uint32_t>(attributes.max_qp_init_rd_atom);
    for (std::uint32_t port = 1; port <= attributes.phys_port_cnt; ++port) {
        ibv_port_attr found{};
        if (api.query_port(context, static_cast<std::uint8_t>(port), &found) != 0) continue;
        out.ports.push_back({port, port_state(found.state),
                             found.link_layer == IBV_LINK_LAYER_ETHERNET ? "Ethernet" : "InfiniBand",
                             mtu_bytes(found.active_mtu), mtu_bytes(found.max_mtu), found.lid,
                             static_cast<std::uint32_t>(found.gid_tbl_len)});
    }
    api.close_device(context);
    return out;
}

}  // namespace

const VerbsApi& verbs_api() {
    static const VerbsApi api = load_api();
    return api;
}

std::string explain_verbs(const std::string& what, int error) {
    const char* name = strerrorname_np(error);
    const std::string head = what + " refused (" + (name == nullptr ? "no reason given" : name) + "): ";
    switch (error) {
        case ENOSYS: return head + "the kernel has no RDMA; run: modprobe ib_uverbs";
        case EACCES:
        case EPERM:
            return head + "no permission for /dev/infiniband/uverbs*; run as root, or add the group "
                          "that owns it";
        case ENOENT:
            return head + "there is no /dev/infiniband/uverbs*; load ib_uverbs, or give the "
                          "container /dev/infiniband";
        case ENOMEM: {
            rlimit limit{};
            getrlimit(RLIMIT_MEMLOCK, &limit);
            const std::string now = limit.rlim_cur == RLIM_INFINITY
                                        ? "unlimited"
                                        : std::to_string(limit.rlim_cur / 1024) + " KiB";
            return head + "RLIMIT_MEMLOCK is " + now +
                   "; it must hold what is registered (clients' arenas once for each peer): raise "
                   "LimitMEMLOCK= of the unit (in a shell: ulimit -l unlimited)";
        }
        case EINVAL: return head + "the device does not take these values";
        default: return head + strerror(error);
    }
}

std::uint32_t random_packet() {
    std::uint32_t value = 0;
    if (getrandom(&value, sizeof value, GRND_NONBLOCK) != sizeof value) value = 1;
    return value & 0xFFFFFF;
}

std::vector<VerbsDevice> list_verbs_devices() {
    const DeviceList devices;
    std::vector<VerbsDevice> out;
    for (int i = 0; i < devices.count; ++i) out.push_back(describe(devices.list[i]));
    return out;
}

VerbsContext::VerbsContext(const std::string& device, std::uint32_t port)
    : name_(device), port_(static_cast<std::uint8_t>(port)) {
    const VerbsApi& api = verbs_api();
    const DeviceList devices;
    for (int i = 0; i < devices.count && context_ == nullptr; ++i) {
        if (api.get_device_name(devices.list[i]) != device) continue;
        errno = 0;
        context_ = api.open_device(devices.list[i]);
        if (context_ == nullptr) {
            const int why = why_not_open(devices.list[i], errno);
            throw VerbsError(explain_verbs(device + ": ibv_open_device", why));
        }
    }
    if (context_ == nullptr) throw VerbsError("there is no RDMA device " + device);
    ibv_port_attr found{};
    int error = api.query_device(context_, &attributes_);
    if (error == 0) error = api.query_port(context_, port_, &found);
    link_layer_ = found.link_layer;
    errno = 0;
    if (error == 0 && (domain_ = api.alloc_pd(context_)) == nullptr) error = errno;
    if (error == 0) return;
    api.close_device(context_);
    throw VerbsError(explain_verbs(device + " port " + std::to_string(port), error));
}

VerbsContext::~VerbsContext() {
    for (auto& [base, shared] : shared_) verbs_api().dereg_mr(shared.region);
    verbs_api().dealloc_pd(domain_);
    verbs_api().close_device(context_);
}

ibv_mr* VerbsContext::reg(std::uint8_t* base, std::uint64_t bytes, int access) const {
    errno = 0;
    ibv_mr* region = verbs_api().reg_mr(domain_, base, bytes, access);
    if (region != nullptr) return region;
    throw VerbsError(explain_verbs(
        name_ + ": registering " + std::to_string(bytes >> 10) + " KiB of memory", errno));
}

ibv_mr* VerbsContext::acquire(std::uint8_t* base, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto at = shared_.find(base);
    if (at != shared_.end()) {
        ++at->second.users;
        return at->second.region;
    }
    ibv_mr* region = reg(base, bytes, IBV_ACCESS_LOCAL_WRITE);
    shared_[base] = {region, 1};
    return region;
}

void VerbsContext::release(std::uint8_t* base) {
    const std::lock_guard lock(mutex_);
    const auto at = shared_.find(base);
    if (at == shared_.end() || --at->second.users != 0) return;
    verbs_api().dereg_mr(at->second.region);
    shared_.erase(at);
}

ibv_qp* VerbsContext::make_queue_pair(ibv_cq* cq, std::uint32_t depth, int access) const {
    const VerbsApi& api = verbs_api();
    ibv_qp_init_attr init{};
    init.send_cq = init.recv_cq = cq;
    init.cap = {depth, 1, 1, 1, 0};
    init.qp_type = IBV_QPT_RC;
    errno = 0;
    ibv_qp* qp = api.create_qp(domain_, &init);
    if (qp == nullptr) throw VerbsError(explain_verbs(name_ + ": making a queue pair", errno));
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_INIT;
    attr.port_num = port_;
    attr.qp_access_flags = static_cast<unsigned>(access);
    const int error = api.modify_qp(
        qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
    if (error == 0) return qp;
    api.destroy_qp(qp);
    throw VerbsError(explain_verbs(name_ + ": preparing a queue pair", error));
}

void VerbsContext::connect(ibv_qp* qp, const VerbsPeer& peer, std::uint32_t gid_index,
                           std::uint32_t first_packet, std::uint64_t timeout_ns) const {
    ibv_qp_attr attr{};
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = mtu_of(peer.mtu);
    attr.dest_qp_num = peer.queue_pair;
    attr.rq_psn = peer.first_packet;
    attr.max_dest_rd_atomic = static_cast<std::uint8_t>(std::clamp(peer.read_depth, 1u, 255u));
    attr.min_rnr_timer = 12;
    attr.ah_attr.port_num = port_;
    attr.ah_attr.dlid = static_cast<std::uint16_t>(peer.lid);
    if (link_layer_ == IBV_LINK_LAYER_ETHERNET) {
        // Tables of GIDs can be longer than what a queue pair has room to name: cut to 8 bits, another
        // entry would be used.
        constexpr std::uint32_t kGidIndexMax = 255;
        if (gid_index > kGidIndexMax)
            throw VerbsError(name_ + ": the GID at index " + std::to_string(gid_index) +
                             " cannot be used: a queue pair names one of the first 256; give the "
                             "address to the port earlier, or set gid_index to another one");
        attr.ah_attr.is_global = 1;
        std::memcpy(attr.ah_attr.grh.dgid.raw, peer.gid.data(), peer.gid.size());
        attr.ah_attr.grh.sgid_index = static_cast<std::uint8_t>(gid_index);
        attr.ah_attr.grh.hop_limit = 64;
    }
    int error = verbs_api().modify_qp(qp, &attr,
                                      IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                                          IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
    if (error != 0) throw VerbsError(explain_verbs(name_ + ": finding the way to the peer (RTR)", error));
    // A lost packet is sent again four times within what a read may take; the reader's own clock
    // ends the read.
    const std::uint64_t unit = std::max<std::uint64_t>(timeout_ns / 4 / 4096, 2);
    attr.qp_state = IBV_QPS_RTS;
    const int timeout = static_cast<int>(std::bit_width(unit)) - 1;
    attr.timeout = static_cast<std::uint8_t>(std::clamp(timeout, 1, 30));
    attr.retry_cnt = 7;
    attr.rnr_retry = 7;
    attr.sq_psn = first_packet;
    attr.max_rd_atomic = attr.max_dest_rd_atomic;
    error = verbs_api().modify_qp(qp, &attr,
                                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                                      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
    if (error != 0) throw VerbsError(explain_verbs(name_ + ": opening the queue pair (RTS)", error));
}

}  // namespace tierd
#endif
