#include "launch_log.h"

#include <cuda_runtime.h>
#include <cxxabi.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <utility>

namespace mrrope {
namespace {

struct Log {
    std::atomic<bool> is_collecting{false};
    std::mutex mutex;
    std::vector<std::string> collected;
    std::set<std::string> printed;
};

Log& log() {
    static Log log;
    return log;
}

bool prints_plans() {
    static const bool prints = [] {
        const char* value = std::getenv("MRROPE_PRINT_PLANS");
        return value != nullptr && *value != '\0' && std::string(value) != "0";
    }();
    return prints;
}

thread_local std::string call;

const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::float64: return "float64";
        case DType::float32: return "float32";
        case DType::float16: return "float16";
        case DType::bfloat16: return "bfloat16";
    }
    return "?";
}

const char* name_of(Pairing pairing) {
    return pairing == Pairing::halves ? "halves" : "interleaved";
}

void remove_all(std::string& text, const std::string& part) {
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at)) text.erase(at, part.size());
}

// "rotary_kernel<bfloat16_t, 8, 2, (Pairing)0, (TableLookup)0, false, false, false>"
std::string name_of_kernel(const void* entry) {
    const char* mangled = nullptr;
    if (cudaFuncGetName(&mangled, entry) != cudaSuccess || mangled == nullptr) return "a kernel";
    int status = 0;
    const std::unique_ptr<char, decltype(&std::free)> demangled(abi::__cxa_demangle(mangled, nullptr, nullptr, &status),
                                                                &std::free);
    std::string name = status == 0 ? demangled.get() : mangled;
    if (const size_t parameters = name.rfind(">("); parameters != std::string::npos) name.resize(parameters + 1);
    for (const char* part : {"void ", "mrrope::", "cutlass::"}) remove_all(name, part);
    return name;
}

bool begins_call() {
    return logs_launches() && call.empty();
}

}  // namespace

LoggedCall::LoggedCall(const char* op, const RotaryArgs& args, int k_heads) : is_outermost_(begins_call()) {
    if (!is_outermost_) return;
    std::ostringstream text;
    text << op << ": " << args.batch << " x " << args.tokens << " tokens, heads " << args.q.heads << "/" << k_heads
         << " of " << args.head_dim;
    if (args.rotary_dim < args.head_dim) text << " (" << args.rotary_dim << " rotated)";
    text << ", " << name_of(args.dtype) << ", " << name_of(args.pairing);
    if (args.choice.count > 1) text << ", " << args.choice.count << " tables";
    if (args.choice.heads > 1) text << ", " << args.choice.heads << " head tables";
    if (args.choice.query_factors != nullptr) text << ", query factors";
    if (args.positions.row_of_pair != nullptr) text << ", " << args.positions.rows << " positions per token";
    call = text.str();
}

LoggedCall::LoggedCall(const char* op, const RescaleCacheArgs& args) : is_outermost_(begins_call()) {
    if (!is_outermost_) return;
    std::ostringstream text;
    text << op << ": " << args.keys.size() << " layers of " << args.batch << " x " << args.tokens << " tokens, heads "
         << args.heads << ", " << args.rotary_dim << " rotated, " << name_of(args.dtype) << ", "
         << name_of(args.pairing);
    call = text.str();
}

LoggedCall::~LoggedCall() {
    if (is_outermost_) call.clear();
}

bool logs_launches() {
    return prints_plans() || log().is_collecting.load(std::memory_order_relaxed);
}

void log_launch(const void* entry, unsigned blocks, int block_threads) {
    std::ostringstream text;
    text << call << " -> " << name_of_kernel(entry) << ", " << blocks << " x " << block_threads << " threads";
    const std::lock_guard lock(log().mutex);
    if (prints_plans() && log().printed.insert(text.str()).second)
        std::fprintf(stderr, "mrrope %s\n", text.str().c_str());
    if (log().is_collecting) log().collected.push_back(text.str());
}

std::vector<std::string> collect_launches(bool on) {
    const std::lock_guard lock(log().mutex);
    log().is_collecting = on;
    return std::exchange(log().collected, {});
}

}  // namespace mrrope
