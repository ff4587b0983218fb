// libibverbs, found at run time: a machine without it loads the core all the same, and is told why
// there are no verbs. The data path needs none of these (posting and polling are calls into the
// device's own provider), so only control calls go through the table.
#pragma once

#include <infiniband/verbs.h>

#include <stdexcept>
#include <string>

// Macros that would call the library by its link-time name.
#undef ibv_query_port
#undef ibv_reg_mr

namespace tierd {

// What the RDMA stack refused; the text is one line for people.
class VerbsError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

struct VerbsApi {
    ibv_device** (*get_device_list)(int*);
    void (*free_device_list)(ibv_device**);
    const char* (*get_device_name)(ibv_device*);
    ibv_context* (*open_device)(ibv_device*);
    int (*close_device)(ibv_context*);
    int (*query_device)(ibv_context*, ibv_device_attr*);
    int (*query_port)(ibv_context*, std::uint8_t, ibv_port_attr*);
    int (*query_gid)(ibv_context*, std::uint8_t, int, ibv_gid*);
    ibv_pd* (*alloc_pd)(ibv_context*);
    int (*dealloc_pd)(ibv_pd*);
    ibv_mr* (*reg_mr)(ibv_pd*, void*, std::size_t, int);
    int (*dereg_mr)(ibv_mr*);
    ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
    int (*destroy_cq)(ibv_cq*);
    ibv_qp* (*create_qp)(ibv_pd*, ibv_qp_init_attr*);
    int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
    int (*query_qp)(ibv_qp*, ibv_qp_attr*, int, ibv_qp_init_attr*);
    int (*destroy_qp)(ibv_qp*);
    const char* (*wc_status_str)(ibv_wc_status);
};

// Loads the library with the first call. VerbsError where there is none.
const VerbsApi& verbs_api();

}  // namespace tierd
