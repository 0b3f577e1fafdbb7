#include "rotary_and_cache_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "devices.h"
#include "elements.h"
#include "kernel_lanes.h"
#include "launch_slices.h"
#include "plans_with_kernel.h"
#include "rotary_and_cache_case.h"
#include "rotary_and_cache_map.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int64_t max_threads = std::numeric_limits<int32_t>::max();

// Contiguous tensors. Pointers serve address arithmetic only and are never dereferenced.
RotaryAndCacheArgs contiguous_args(DType dtype, StoredAs cached_as, int64_t batch, int64_t tokens, int q_heads,
                                   int kv_heads, int head_dim, int rotary_dim) {
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
    args.cached_as = cached_as;
    return args;
}

RotaryPlan plan_of(const RotaryAndCacheArgs& args) {
    return plan(shape_of(args), h200);
}

HeadGroups head_groups_of(const RotaryAndCacheArgs& args, int heads_per_thread) {
    return head_groups(args.rotary.q.heads, args.k.view.heads, heads_per_thread, args.rotary.choice.heads);
}

std::string describe(const RotaryAndCacheArgs& args) {
    return std::string(name_of(args.rotary.dtype)) + name_of(args.cached_as) + " batch " +
           std::to_string(args.rotary.batch) + " tokens " + std::to_string(args.rotary.tokens) + " heads " +
           std::to_string(args.rotary.q.heads) + "+" + std::to_string(args.k.view.heads) + " head_dim " +
           std::to_string(args.rotary.head_dim) + " rotary_dim " + std::to_string(args.rotary.rotary_dim) +
           (args.rotary.pairing == Pairing::halves ? "" : " interleaved") + " head tables " +
           std::to_string(args.rotary.choice.heads);
}

// Calls f for heads of every dtype, with a cache of their dtype and of both kinds of float8.
template <class F>
void for_each_kind(F&& f) {
    for (const DType dtype : all_dtypes) {
        for (const StoredAs cached_as : every_stored_as) {
            if (!is_float8(cached_as) || dtype != DType::float64) f(dtype, cached_as);
            if (::testing::Test::HasFailure()) return;
        }
    }
}

// --- invariants of every plan

// The vectors that there are kernels for, from the widest on.
std::vector<int> vectors_of_kernels(const RotaryAndCacheArgs& args) {
    const bool halves = args.rotary.pairing == Pairing::halves;
    if (size_of(args.rotary.dtype) == 2) return halves ? std::vector{8, 4, 2, 1} : std::vector{8, 4, 1};
    const bool has_vectors = args.rotary.dtype == DType::float32 && halves && !is_float8(args.cached_as);
    return has_vectors ? std::vector{4, 2, 1} : std::vector{1};
}

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for_each_kind([](DType dtype, StoredAs cached_as) {
        for (const auto& [q_heads, kv_heads] : {std::pair{1, 1}, {32, 8}, {7, 3}, {0, 4}, {1, 0}, {71, 1}, {64, 64}}) {
            for (const int head_dim : {2, 6, 16, 30, 64, 72, 80, 96, 100, 120, 128, 256, 512}) {
                for (const int rotary_dim : {2, 16, head_dim / 4 * 2, head_dim}) {
                    if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                    for (const auto& [pairing, misaligned] :
                         {std::pair{Pairing::halves, false}, {Pairing::halves, true}, {Pairing::interleaved, false}}) {
                        for (const auto& [batch, tokens] : {std::pair{int64_t{1}, int64_t{1}},
                                                            {64, 1},
                                                            {1, 8192},
                                                            {3, int64_t{1} << 31},
                                                            {int64_t{1} << 20, 1024}}) {
                            RotaryAndCacheArgs args = contiguous_args(dtype, cached_as, batch, tokens, q_heads,
                                                                      kv_heads, head_dim, rotary_dim);
                            args.rotary.pairing = pairing;
                            if (misaligned) args.rotary.q.out = static_cast<char*>(args.rotary.q.out) + size_of(dtype);
                            if (misaligned) args.v.view.out = static_cast<char*>(args.v.view.out) + 1;
                            SCOPED_TRACE(describe(args));
                            const RotaryAndCacheShape shape = shape_of(args);
                            const RotaryPlan plan = plan_of(args);
                            EXPECT_TRUE(has_plan(shape, plan.vector, plan.heads_per_thread)) << "no kernel";
                            int widest = 1;
                            for (const int vector : vectors_of_kernels(args)) {
                                const bool fits = !misaligned && rotary_dim / 2 % vector == 0 &&
                                                  (head_dim - rotary_dim) % vector == 0;
                                if (fits) widest = std::max(widest, vector);
                            }
                            const int full = 16 / size_of(dtype);
                            const bool is_full = plan.vector == full && widest > 1;
                            EXPECT_TRUE(plan.vector == widest || (widest == full && plan.vector == full / 2));
                            EXPECT_EQ(plan.heads_per_thread, is_full ? 2 : 1);
                            EXPECT_EQ(plan.lanes * plan.vector, rotary_dim / 2);
                            const HeadGroups groups = head_groups_of(args, plan.heads_per_thread);
                            EXPECT_EQ(groups.count(), plan.head_groups);
                            EXPECT_GE(groups.queries * plan.heads_per_thread, q_heads);
                            EXPECT_LT((groups.queries - 1) * plan.heads_per_thread, q_heads);
                            EXPECT_GE(groups.keys * plan.heads_per_thread, kv_heads);
                            EXPECT_LT((groups.keys - 1) * plan.heads_per_thread, kv_heads);
                            EXPECT_LE(plan.tokens_per_launch * plan.threads_per_token() + rotary_block_threads,
                                      max_threads);
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

TEST(Plan, GivesThreadsLessWorkInSmallLaunches) {
    for (const DType dtype : {DType::float32, DType::float16, DType::bfloat16}) {
        const int full = full_vector(size_of(dtype));
        for (const auto& [q_heads, kv_heads] : {std::pair{32, 8}, {1, 0}, {0, 1}}) {
            const auto plan_for = [&](int64_t tokens) {
                return plan_of(contiguous_args(dtype, StoredAs::heads_dtype, 1, tokens, q_heads, kv_heads, 128, 128));
            };
            EXPECT_EQ(plan_for(1).heads_per_thread, 1);
            EXPECT_EQ(plan_for(1).vector, full / 2);
            EXPECT_EQ(plan_for(1 << 17).heads_per_thread, 2);
            EXPECT_EQ(plan_for(1 << 17).vector, full);
        }
    }
}

TEST(Plan, TakesTheWidestVectorsOfHeadsThatAreNotMadeOfFullOnes) {
    for (const StoredAs cached_as : every_stored_as) {
        for (const int64_t tokens : {1, 8192}) {
            for (const auto& [head_dim, vector] : {std::pair{120, 4}, {72, 4}, {100, 2}, {50, 1}}) {
                const RotaryPlan plan =
                    plan_of(contiguous_args(DType::bfloat16, cached_as, 1, tokens, 32, 8, head_dim, head_dim));
                EXPECT_EQ(plan.vector, vector) << head_dim;
                EXPECT_EQ(plan.heads_per_thread, 1) << head_dim;
            }
        }
    }
}

// --- kernels

constexpr TableLookup every_lookup[] = {TableLookup::single, TableLookup::indexed, TableLookup::position_rows};

template <class F>
void for_each_kernel(F&& f) {
    for (const int element_size : {2, 4, 8}) {
        for (const Pairing pairing : both_pairings) {
            for (const bool float8 : {false, true}) {
                for (int vector = 0; vector <= 16; ++vector) {
                    for (const int heads_per_thread : {1, 2, 3}) {
                        for (const TableLookup lookup : every_lookup) {
                            if (has_rotary_and_cache_kernel(element_size, pairing, float8, vector, heads_per_thread,
                                                            lookup)) {
                                f(element_size, pairing, float8, vector, heads_per_thread, lookup);
                            }
                        }
                    }
                }
            }
        }
    }
}

TEST(Kernels, Are18OfEach16BitTypeAnd8Others) {
    int count[9] = {};
    for_each_kernel([&](int element_size, auto...) { ++count[element_size]; });
    EXPECT_EQ(count[2], 18);
    EXPECT_EQ(count[4], 6);
    EXPECT_EQ(count[8], 2);
}

TEST(Kernels, ForOneTableOrOfVectorsAreBesideOnesForAllCalls) {
    for_each_kernel([](int element_size, Pairing pairing, bool float8, int vector, int heads_per_thread, TableLookup) {
        EXPECT_TRUE(
            has_rotary_and_cache_kernel(element_size, pairing, float8, vector, heads_per_thread, TableLookup::indexed));
        EXPECT_TRUE(has_rotary_and_cache_kernel(element_size, pairing, float8, 1, 1, TableLookup::indexed));
    });
}

// --- thread-to-element map of the kernel

// Counts how often each component of q, k and v is written, over all threads of a launch.
class Coverage {
public:
    Coverage(const RotaryAndCacheArgs& args, const RotaryPlan& plan)
        : args_(args),
          plan_(plan),
          map_(RotaryMap<PlainDivmod>::of(plan, args.rotary.tokens)),
          heads_(args.rotary.q.heads + args.k.view.heads + args.v.view.heads),
          touched_(args.rotary.batch * args.rotary.tokens * heads_ * args.rotary.head_dim) {}

    void run() {
        const int64_t threads = args_.rotary.batch * args_.rotary.tokens * plan_.threads_per_token();
        with_pairing_and_vector(args_.rotary.pairing, plan_.vector, [&]<Pairing pairing, int Vector>() {
            for (int64_t thread = 0; thread < threads; ++thread) run<pairing, Vector>(static_cast<int>(thread));
        });
    }

    void expect_each_component_once() const {
        for (size_t i = 0; i < touched_.size(); ++i) {
            ASSERT_EQ(touched_[i], 1) << "component " << i % args_.rotary.head_dim << " of head "
                                      << i / args_.rotary.head_dim % heads_;
        }
    }

private:
    template <Pairing pairing, int Vector>
    void run(int thread) {
        const RotaryPlace place = map_.place(thread);
        const int64_t token = place.batch * args_.rotary.tokens + place.token;
        const int half = args_.rotary.rotary_dim / 2;
        const LaneLayout<pairing, Vector> layout{place.lane, half};
        const auto groups = HeadGroupsOfCacheMap<PlainDivmod>::of(plan_, args_.rotary.q.heads, args_.k.view.heads);
        const auto with_tables = groups.heads_of<true>(place.group, args_.rotary.q.heads, args_.k.view.heads);
        const auto with_one = groups.heads_of<false>(place.group, args_.rotary.q.heads, args_.k.view.heads);
        const HeadsOfThread& heads = plan_.table_heads == 1 && thread % 2 == 0 ? with_one : with_tables;
        const HeadsView& view = heads.view(args_);
        ASSERT_TRUE(heads.exists(0)) << "an idle thread";
        const int heads_before = heads.kind == HeadsOfThread::query ? 0
                                 : heads.kind == HeadsOfThread::key ? args_.rotary.q.heads
                                                                    : args_.rotary.q.heads + args_.k.view.heads;
        for (int j = 0; heads.exists(j); ++j) {
            ASSERT_LT(j, plan_.heads_per_thread);
            if (heads.kind != HeadsOfThread::value) {
                ASSERT_EQ(heads.table, heads.head(j) / (view.heads / args_.rotary.choice.heads)) << heads.head(j);
            }
            const int head = heads_before + heads.head(j);
            rotate_components<pairing, Vector>(layout, half, [&](int at) { touch(token, head, at); });
            for (int at = first_tail_component<Vector>(place.lane, args_.rotary.rotary_dim); at < args_.rotary.head_dim;
                 at += tail_step<Vector>(map_.lanes.divisor)) {
                ASSERT_EQ(at % Vector, 0) << "an unaligned access";
                for (int i = 0; i < Vector; ++i) touch(token, head, at + i);
            }
        }
    }

    void touch(int64_t token, int64_t head, int64_t component) {
        ASSERT_LT(component, args_.rotary.head_dim);
        ++touched_.at((token * heads_ + head) * args_.rotary.head_dim + component);
    }

    RotaryAndCacheArgs args_;
    RotaryPlan plan_;
    RotaryMap<PlainDivmod> map_;
    int64_t heads_;
    std::vector<int> touched_;
};

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_kind([](DType dtype, StoredAs cached_as) {
        for (const auto& [q_heads, kv_heads, table_heads] : {std::tuple{1, 1, 1},
                                                             {4, 2, 1},
                                                             {5, 3, 1},
                                                             {0, 2, 1},
                                                             {3, 0, 1},
                                                             {32, 8, 1},
                                                             {32, 8, 8},
                                                             {9, 3, 3},
                                                             {10, 6, 2},
                                                             {0, 4, 4},
                                                             {6, 0, 3}}) {
            for (const int head_dim : {2, 6, 16, 34, 64, 72, 80, 96, 100, 120, 128, 256}) {
                for (const int rotary_dim : {2, 16, 32, head_dim / 4 * 2, head_dim}) {
                    if (rotary_dim < 2 || rotary_dim > head_dim) continue;
                    RotaryAndCacheArgs args =
                        contiguous_args(dtype, cached_as, 2, 2, q_heads, kv_heads, head_dim, rotary_dim);
                    args.rotary.choice.heads = table_heads;
                    for (const Pairing pairing : both_pairings) {
                        args.rotary.pairing = pairing;
                        for (const RotaryPlan& plan : plans_with_kernel(shape_of(args))) {
                            SCOPED_TRACE(describe(args) + ", " + describe_vectors(plan));
                            Coverage kernel(args, plan);
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
            for_each_launch(whole, per_launch, [](const RotaryAndCacheArgs& part) { rotary_and_cache_cpu(part); });
            cache.expect_written();
        }
    }
}

TEST(Launches, OfHugeTensorsAreFewAndComplete) {
    const RotaryAndCacheArgs args =
        contiguous_args(DType::bfloat16, StoredAs::heads_dtype, 3, int64_t{1} << 31, 32, 8, 128, 128);
    const RotaryPlan plan = plan_of(args);
    int64_t tokens = 0;
    int launches = 0;
    for_each_launch(args, plan.tokens_per_launch, [&](const RotaryAndCacheArgs& part) {
        ++launches;
        ASSERT_EQ(part.rotary.batch, 1);
        EXPECT_LE(part.rotary.tokens * plan.threads_per_token() + rotary_block_threads, max_threads);
        EXPECT_EQ(reinterpret_cast<uintptr_t>(part.v.view.in),
                  reinterpret_cast<uintptr_t>(args.v.view.in) + tokens * 8 * 128 * 2);
        tokens += part.rotary.tokens;
    });
    EXPECT_EQ(tokens, args.rotary.batch * args.rotary.tokens);
    EXPECT_LT(launches, 1000);
}

// --- alignment

TEST(Alignment, IsLostByOneElementOfAnyTensor) {
    for_each_kind([](DType dtype, StoredAs cached_as) {
        const int element = size_of(dtype);
        const int cached = size_of(cached_as, dtype);
        const int full = full_vector(element);
        const RotaryAndCacheArgs aligned = contiguous_args(dtype, cached_as, 1, 1, 2, 2, 64, 64);
        const auto vector_of = [](const RotaryAndCacheArgs& args) { return shape_of(args).aligned_vector; };
        ASSERT_EQ(vector_of(aligned), full);
        const auto moved = [](const void* pointer, int bytes) {
            return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
        };
        for (const int which : {0, 1, 2}) {
            const auto view = [&](RotaryAndCacheArgs& args) -> HeadsView& {
                return which == 0 ? args.rotary.q : which == 1 ? args.k.view : args.v.view;
            };
            const int written = which == 0 ? element : cached;
            // By `elements`, vectors of as many stay aligned. A float8 vector has fewer bytes.
            for (int elements = 1; elements <= full; elements *= 2) {
                RotaryAndCacheArgs args = aligned;
                view(args).in = moved(view(args).in, elements * element);
                EXPECT_EQ(vector_of(args), elements) << describe(args);
                args = aligned;
                view(args).out = moved(view(args).out, elements * written);
                EXPECT_EQ(vector_of(args), elements) << describe(args);
                for (int64_t HeadStrides::* const stride :
                     {&HeadStrides::batch, &HeadStrides::token, &HeadStrides::head}) {
                    args = aligned;
                    view(args).in_strides.*stride += elements;
                    EXPECT_EQ(vector_of(args), elements) << describe(args);
                    args = aligned;
                    view(args).out_strides.*stride += elements;
                    EXPECT_EQ(vector_of(args), elements) << describe(args);
                }
            }
        }
    });
}

}  // namespace
}  // namespace mrrope
