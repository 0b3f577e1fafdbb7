#include "mrrope/rotary.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel_items.h"
#include "rotate_tokens.h"

namespace mrrope {

int size_of(DType dtype) {
    switch (dtype) {
        case DType::float64: return 8;
        case DType::float32: return 4;
        case DType::float16:
        case DType::bfloat16: return 2;
    }
    return 0;
}

int size_of(StoredAs stored_as, DType heads_dtype) {
    return is_float8(stored_as) ? 1 : size_of(heads_dtype);
}

void on_all_cores(int64_t count, int64_t grain, const RangeBody& body) {
    const int64_t cores = std::max(1u, std::thread::hardware_concurrency());
    const int64_t parts = std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, cores);
    std::mutex mutex;
    std::exception_ptr failure;
    // An exception that left a thread, or this function before its threads are joined, would terminate the process.
    const auto run_part = [&](int64_t part) {
        try {
            body(count * part / parts, count * (part + 1) / parts);
        } catch (...) {
            const std::scoped_lock lock(mutex);
            if (!failure) failure = std::current_exception();
        }
    };
    {
        std::vector<std::jthread> threads;
        threads.reserve(parts - 1);
        for (int64_t part = 1; part < parts; ++part) threads.emplace_back(run_part, part);
        run_part(0);
    }
    if (failure) std::rethrow_exception(failure);
}

void rotary_cpu(const RotaryArgs& args, const ParallelFor& parallel_for) {
    static const auto rotate_tokens = MRROPE_BEST(rotate_tokens);
    validate(args);
    const int64_t per_token = static_cast<int64_t>(args.q.heads + args.k.heads) * args.head_dim;
    parallel_for_items(parallel_for, args.batch * args.tokens, per_token, components_per_thread,
                       [&](int64_t begin, int64_t end) { rotate_tokens(args, begin, end); });
}

}  // namespace mrrope
