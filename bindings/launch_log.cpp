#include <torch/library.h>

#include <string>
#include <vector>

#ifdef MRROPE_WITH_CUDA
#include "mrrope/launch_log.h"
#endif

namespace mrrope {
namespace {

// Without CUDA kernels there is nothing to collect.
std::vector<std::string> collected([[maybe_unused]] bool on) {
#ifdef MRROPE_WITH_CUDA
    return collect_launches(on);
#else
    return {};
#endif
}

}  // namespace
}  // namespace mrrope

TORCH_LIBRARY_FRAGMENT(mrrope, library) {
    library.def("collect_launches(bool on) -> str[]", &mrrope::collected);
}
