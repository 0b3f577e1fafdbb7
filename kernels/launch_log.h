#pragma once

#include "mrrope/launch_log.h"
#include "mrrope/rescale_cache.h"
#include "mrrope/rotary.h"

// Where launchers say what they launch. The template arguments of a kernel are its plan.

namespace mrrope {

// Names the op and the shape of the launches in its lifetime, on its thread. The outermost one counts: an op that
// launches another's kernels is logged under its own name.
class LoggedCall {
public:
    LoggedCall(const char* op, const RotaryArgs& args, int k_heads);
    LoggedCall(const char* op, const RotaryArgs& args) : LoggedCall(op, args, args.k.heads) {}
    LoggedCall(const char* op, const RescaleCacheArgs& args);
    ~LoggedCall();
    LoggedCall(const LoggedCall&) = delete;
    LoggedCall& operator=(const LoggedCall&) = delete;

private:
    bool is_outermost_;
};

// Whether log_launch does anything: otherwise a launch costs one load more.
bool logs_launches();
void log_launch(const void* entry, unsigned blocks, int block_threads);

}  // namespace mrrope
