#include "rotary_and_cache_plan.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "elements.h"
#include "lane_mirror.h"
#include "rotary_and_cache_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int64_t most_threads = std::numeric_limits<int32_t>::max();

// Pointers that are only computed with, never followed: everything contiguous.
RotaryAndCacheArgs contiguous_args(DType dtype, bool float8, int64_t batch, int64_t tokens, int q_heads, int kv_heads,
                                   int head_dim, int rotary_dim) {
    const auto strides = [&](int64_t middle, int heads) {
        return HeadStrides{.batch = middle * heads * head_dim, .token = heads * head_dim, .head = head_dim};
    };
    RotaryAndCacheArgs args;
    uintptr_t at = 1 << 20;
    const auto next = [&] { return reinterpret_cast<void*>(at += 4096); };
    args.rotary.q = {.in = next(),
                     .out = next(),
                     .heads = q_heads,
                     .in_strides = strides(tokens, q_heads),
                     .out_strides = strides(tokens, q_heads)};
    args.slots = {.of_tokens = {.data = next()}, .paged = true, .blocks = 8, .block_size = 16};
    for (CachedHeads* cached : {&args.k, &args.v}) {
        cached->view = {.in = next(),
                        .out = next(),
                        .heads = kv_heads,
                        .in_strides = strides(tokens, kv_heads),
                        .out_strides = strides(16, kv_heads)};
    }
    args.rotary.positions.data = next();
    args.rotary.batch = batch;
    args.rotary.tokens = tokens;
    args.rotary.head_dim = head_dim;
    args.rotary.rotary_dim = rotary_dim;
    args.rotary.dtype = dtype;
    args.float8 = float8;
    return args;
}

std::string describe(const RotaryAndCacheArgs& args) {
    return std::string(name_of(args.rotary.dtype)) + (args.float8 ? " float8" : "") + " batch " +
           std::to_string(args.rotary.batch) + " tokens " + std::to_string(args.rotary.tokens) + " heads " +
           std::to_string(args.rotary.q.heads) + "+" + std::to_string(args.k.view.heads) + " head_dim " +
           std::to_string(args.rotary.head_dim) + " rotary_dim " + std::to_string(args.rotary.rotary_dim);
}

// Calls f with both kinds of cache for heads of every dtype.
template <class F>
void for_each_kind(F&& f) {
    for (const DType dtype : all_dtypes) {
        for (const bool float8 : {false, true}) {
            if (!float8 || dtype != DType::float64) f(dtype, float8);
            if (::testing::Test::HasFailure()) return;
        }
    }
}

// --- what every plan must be
// -------------------------------------------------------------------------------------------

TEST(Plan, HoldsItsPromisesForEveryShape) {
    for_each_kind([](DType dtype, bool float8) {
        for (const auto& [q_heads, kv_heads] : {std::pair{1, 1}, {32, 8}, {7, 3}, {0, 4}, {71, 1}, {64, 64}}) {
            for (const int head_dim : {2, 6, 16, 30, 64, 72, 80, 96, 100, 128, 256, 512}) {
                for (const int rotary_dim : {2, 16, head_dim / 4 * 2, head_dim}) {
                    if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                    for (const bool misaligned : {false, true}) {
                        for (const auto& [batch, tokens] : {std::pair{int64_t{1}, int64_t{1}},
                                                            {64, 1},
                                                            {1, 8192},
                                                            {3, int64_t{1} << 31},
                                                            {int64_t{1} << 20, 1024}}) {
                            RotaryAndCacheArgs args =
                                contiguous_args(dtype, float8, batch, tokens, q_heads, kv_heads, head_dim, rotary_dim);
                            if (misaligned) args.v.view.out = static_cast<char*>(args.v.view.out) + 1;
                            SCOPED_TRACE(describe(args));
                            const RotaryPlan plan = plan_rotary_and_cache(args);
                            const int full = 16 / size_of(dtype);
                            const bool fits = !misaligned && head_dim % full == 0 && rotary_dim / 2 % full == 0 &&
                                              (head_dim - rotary_dim) % full == 0;
                            const bool is_full = plan.vector == full;
                            EXPECT_TRUE(fits ? is_full || plan.vector == full / 2 : plan.vector == 1);
                            EXPECT_EQ(plan.lanes * plan.vector, rotary_dim / 2);
                            // What there are kernels for.
                            EXPECT_TRUE(plan.heads_per_thread == 1 || (plan.heads_per_thread == 2 && is_full && fits));
                            const HeadGroups groups = head_groups(args, plan.heads_per_thread);
                            EXPECT_EQ(groups.queries + 2 * groups.keys, plan.head_groups);
                            EXPECT_GE(groups.queries * plan.heads_per_thread, q_heads);
                            EXPECT_LT((groups.queries - 1) * plan.heads_per_thread, q_heads);
                            EXPECT_GE(groups.keys * plan.heads_per_thread, kv_heads);
                            EXPECT_LT((groups.keys - 1) * plan.heads_per_thread, kv_heads);
                            EXPECT_LE(plan.tokens_per_launch * plan.threads_per_token() + rotary_block_threads,
                                      most_threads);
                            if (plan.tokens_per_launch < batch * tokens) {
                                EXPECT_LE(plan.tokens_per_launch, tokens) << "a slice lies in one sequence";
                            }
                            if (::testing::Test::HasFailure()) return;
                        }
                    }
                }
            }
        }
    });
}

TEST(Plan, GivesThreadsLessToDoWhereThereAreFew) {
    for_each_kind([](DType dtype, bool float8) {
        const int full = 16 / size_of(dtype);
        const RotaryPlan few = plan_rotary_and_cache(contiguous_args(dtype, float8, 1, 1, 32, 8, 128, 128));
        EXPECT_EQ(few.heads_per_thread, 1);
        EXPECT_EQ(few.vector, full / 2);
        const RotaryPlan many = plan_rotary_and_cache(contiguous_args(dtype, float8, 1, 8192, 32, 8, 128, 128));
        EXPECT_EQ(many.heads_per_thread, 2);
        EXPECT_EQ(many.vector, full);
    });
}

// --- the kernel's index arithmetic, mirrored
// ---------------------------------------------------------------------------

// Counts who writes which component of q and of the slots of the caches, thread by thread.
class KernelMirror {
public:
    KernelMirror(const RotaryAndCacheArgs& args, const RotaryPlan& plan)
        : args_(args),
          plan_(plan),
          heads_(args.rotary.q.heads + args.k.view.heads + args.v.view.heads),
          touched_(args.rotary.batch * args.rotary.tokens * heads_ * args.rotary.head_dim) {}

    void run() {
        const int64_t threads = args_.rotary.batch * args_.rotary.tokens * plan_.threads_per_token();
        for (int64_t thread = 0; thread < threads; ++thread) run(thread);
    }

    void expect_each_component_once() const {
        for (size_t i = 0; i < touched_.size(); ++i) {
            ASSERT_EQ(touched_[i], 1) << "component " << i % args_.rotary.head_dim << " of head "
                                      << i / args_.rotary.head_dim % heads_;
        }
    }

private:
    void run(int64_t thread) {
        const int64_t lane = thread % plan_.lanes;
        const int64_t item = thread / plan_.lanes;
        const auto group = static_cast<int>(item % plan_.head_groups);
        const int64_t token = item / plan_.head_groups;
        const LaneMirror layout{args_.rotary.pairing, plan_.vector, static_cast<int>(lane),
                                args_.rotary.rotary_dim / 2};
        const HeadGroups groups = head_groups(args_, plan_.heads_per_thread);
        const int q_heads = args_.rotary.q.heads;
        const int kv_heads = args_.k.view.heads;
        const bool is_query = group < groups.queries;
        const bool is_value = group >= groups.queries + groups.keys;
        const int step = is_query ? groups.queries : groups.keys;
        const int first = group - (is_query ? 0 : groups.queries) - (is_value ? groups.keys : 0);
        const int before = is_query ? 0 : is_value ? q_heads + kv_heads : q_heads;  // heads of other kinds
        const auto exists = [&](int j) { return first + j * step < (is_query ? q_heads : kv_heads); };
        for (int j = 0; j < plan_.heads_per_thread && exists(j); ++j) {
            layout.rotate([&](int at) { touch(token, before + first + j * step, at); });
        }
        for (int j = 0; exists(j); ++j) {
            for (int64_t at = args_.rotary.rotary_dim + lane * plan_.vector; at < args_.rotary.head_dim;
                 at += int64_t{plan_.lanes} * plan_.vector) {
                ASSERT_EQ(at % plan_.vector, 0);
                for (int i = 0; i < plan_.vector; ++i) touch(token, before + first + j * step, at + i);
            }
        }
    }

    void touch(int64_t token, int64_t head, int64_t component) {
        ASSERT_LT(component, args_.rotary.head_dim);
        ++touched_.at((token * heads_ + head) * args_.rotary.head_dim + component);
    }

    RotaryAndCacheArgs args_;
    RotaryPlan plan_;
    int64_t heads_;
    std::vector<int> touched_;
};

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_kind([](DType dtype, bool float8) {
        for (const auto& [q_heads, kv_heads] : {std::pair{1, 1}, {4, 2}, {5, 3}, {0, 2}, {3, 0}, {32, 8}}) {
            for (const int head_dim : {2, 6, 16, 34, 64, 72, 80, 96, 128, 256}) {
                for (const int rotary_dim : {2, 16, 32, head_dim / 4 * 2, head_dim}) {
                    if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                    RotaryAndCacheArgs args =
                        contiguous_args(dtype, float8, 2, 2, q_heads, kv_heads, head_dim, rotary_dim);
                    RotaryPlan plan = plan_rotary_and_cache(args);
                    // Small shapes as the kernel takes them when they are large.
                    for (const auto& [times, heads_per_thread] : {std::pair{1, 1}, {2, 1}, {1, 2}}) {
                        if (times == 2 && (head_dim * size_of(dtype) % 32 != 0 || rotary_dim != head_dim)) continue;
                        const HeadGroups groups = head_groups(args, heads_per_thread);
                        plan = plan_rotary_and_cache(args);
                        plan.vector *= times;
                        plan.lanes /= times;
                        plan.heads_per_thread = heads_per_thread;
                        plan.head_groups = groups.queries + 2 * groups.keys;
                        for (const Pairing pairing : both_pairings) {
                            args.rotary.pairing = pairing;
                            SCOPED_TRACE(describe(args));
                            KernelMirror kernel(args, plan);
                            kernel.run();
                            kernel.expect_each_component_once();
                            if (::testing::Test::HasFailure()) return;
                        }
                    }
                }
            }
        }
    });
}

// --- launches
// ----------------------------------------------------------------------------------------------------------

TEST(Launches, TakeEveryTokenOnceAndEverySequenceToItsBlock) {
    for (const bool paged : {false, true}) {
        for (const int64_t per_launch : {1, 2, 5, 7, 21}) {
            CacheOptions options;
            options.rotary.batch = 3;
            options.rotary.tokens = 7;
            options.rotary.in_place = true;
            options.paged = paged;
            options.blocks = 9;
            options.block_size = 30;
            SCOPED_TRACE(testing::describe(options));
            RotaryAndCacheCase cache(options);
            const RotaryAndCacheArgs whole = cache.args();
            RotaryPlan plan;
            plan.tokens_per_launch = per_launch;
            for_each_launch(whole, plan, [](const RotaryAndCacheArgs& part) { rotary_and_cache_cpu(part); });
            cache.expect_written();
        }
    }
}

TEST(Launches, OfHugeTensorsAreFewAndComplete) {
    const RotaryAndCacheArgs args = contiguous_args(DType::bfloat16, false, 3, int64_t{1} << 31, 32, 8, 128, 128);
    const RotaryPlan plan = plan_rotary_and_cache(args);
    int64_t tokens = 0;
    int launches = 0;
    for_each_launch(args, plan, [&](const RotaryAndCacheArgs& part) {
        ++launches;
        ASSERT_EQ(part.rotary.batch, 1);
        EXPECT_LE(part.rotary.tokens * plan.threads_per_token() + rotary_block_threads, most_threads);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.v.view.in),
                  reinterpret_cast<uintptr_t>(args.v.view.in) + tokens * 8 * 128 * 2);
        tokens += part.rotary.tokens;
    });
    EXPECT_EQ(tokens, args.rotary.batch * args.rotary.tokens);
    EXPECT_LT(launches, 1000);
}

// --- alignment
// ---------------------------------------------------------------------------------------------------------

int vector_of(const RotaryAndCacheArgs& args) {
    return plan_rotary_and_cache(args).vector;
}

TEST(Alignment, IsLostByOneElementOfAnyTensor) {
    for_each_kind([](DType dtype, bool float8) {
        const int element = size_of(dtype);
        const int cached = float8 ? 1 : element;
        const RotaryAndCacheArgs aligned = contiguous_args(dtype, float8, 1, 1 << 16, 2, 2, 64, 64);
        ASSERT_EQ(vector_of(aligned), 16 / element);
        const auto moved = [](const void* pointer, int bytes) {
            return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
        };
        for (const int which : {0, 1, 2}) {
            const auto view = [&](RotaryAndCacheArgs& args) -> HeadsView& {
                return which == 0 ? args.rotary.q : which == 1 ? args.k.view : args.v.view;
            };
            const int written = which == 0 ? element : cached;
            RotaryAndCacheArgs args = aligned;
            view(args).in = moved(view(args).in, element);
            EXPECT_EQ(vector_of(args), 1) << describe(args);
            args = aligned;
            view(args).out = moved(view(args).out, written);
            EXPECT_EQ(vector_of(args), 1) << describe(args);
            for (int64_t HeadStrides::* const stride : {&HeadStrides::batch, &HeadStrides::token, &HeadStrides::head}) {
                args = aligned;
                view(args).in_strides.*stride += 1;
                EXPECT_EQ(vector_of(args), 1) << describe(args);
                args = aligned;
                view(args).out_strides.*stride += 1;
                EXPECT_EQ(vector_of(args), 1) << describe(args);
                // Whole vectors, of float8 of fewer bytes, keep it.
                view(args).out_strides.*stride += 16 / element - 1;
                EXPECT_EQ(vector_of(args), 16 / element) << describe(args);
            }
        }
    });
}

}  // namespace
}  // namespace mrrope
