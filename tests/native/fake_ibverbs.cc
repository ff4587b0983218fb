#include "fake_ibverbs.h"

#include <algorithm>
#include <cstring>

FakeVerbs fake_verbs;

namespace {

ibv_device device{};
ibv_context context{};
ibv_pd domain{};
ibv_cq queue{};

int post_send(ibv_qp*, ibv_send_wr* wr, ibv_send_wr**) {
    for (; wr != nullptr; wr = wr->next) fake_verbs.posted.push_back(wr->wr_id);
    return 0;
}

int poll_cq(ibv_cq*, int room, ibv_wc* out) {
    auto& left = fake_verbs.completions;
    const int n = std::min(room, static_cast<int>(left.size()));
    std::copy_n(left.begin(), n, out);
    left.erase(left.begin(), left.begin() + n);
    return n;
}

}  // namespace

// Under names of their own: several of the library's are macros in its header.
#define EXPORT(result, name, ...)                                                            \
    extern "C" __attribute__((visibility("default"))) result fake_##name(__VA_ARGS__) __asm__( \
        "ibv_" #name);                                                                       \
    extern "C" result fake_##name(__VA_ARGS__)

EXPORT(ibv_device**, get_device_list, int* count) {
    *count = 1;
    return new ibv_device* [2] { &device, nullptr };
}
EXPORT(void, free_device_list, ibv_device** list) { delete[] list; }
EXPORT(const char*, get_device_name, ibv_device*) { return "fake0"; }
EXPORT(ibv_context*, open_device, ibv_device*) {
    context.ops.post_send = post_send;
    context.ops.poll_cq = poll_cq;
    return &context;
}
EXPORT(int, close_device, ibv_context*) { return 0; }
EXPORT(int, query_device, ibv_context*, ibv_device_attr* out) {
    *out = {};
    out->max_qp_wr = out->max_cqe = 1024;
    return 0;
}
EXPORT(int, query_port, ibv_context*, std::uint8_t, ibv_port_attr* out) {
    *out = {};
    out->link_layer = IBV_LINK_LAYER_ETHERNET;
    return 0;
}
EXPORT(int, query_gid, ibv_context*, std::uint8_t, int, ibv_gid*) { return 0; }
EXPORT(ibv_pd*, alloc_pd, ibv_context*) { return &domain; }
EXPORT(int, dealloc_pd, ibv_pd*) { return 0; }
EXPORT(ibv_mr*, reg_mr, ibv_pd*, void* base, std::size_t bytes, int) {
    ++fake_verbs.regions;
    auto* region = new ibv_mr{};
    region->addr = base;
    region->length = bytes;
    return region;
}
EXPORT(int, dereg_mr, ibv_mr* region) {
    --fake_verbs.regions;
    delete region;
    return 0;
}
EXPORT(ibv_cq*, create_cq, ibv_context*, int, void*, ibv_comp_channel*, int) {
    queue.context = &context;
    return &queue;
}
EXPORT(int, destroy_cq, ibv_cq*) { return 0; }
EXPORT(ibv_qp*, create_qp, ibv_pd*, ibv_qp_init_attr*) {
    ++fake_verbs.queue_pairs;
    auto* made = new ibv_qp{};
    made->context = &context;
    return made;
}
EXPORT(int, modify_qp, ibv_qp*, ibv_qp_attr*, int) { return 0; }
EXPORT(int, query_qp, ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*) { return 0; }
EXPORT(int, destroy_qp, ibv_qp* gone) {
    --fake_verbs.queue_pairs;
    delete gone;
    return 0;
}
EXPORT(const char*, wc_status_str, ibv_wc_status) { return "as the test says"; }
