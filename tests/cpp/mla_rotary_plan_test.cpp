#include "mla_rotary_plan.h"

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
#include "mla_rotary_and_cache_case.h"
#include "mla_rotary_map.h"
#include "plans_with_kernel.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr int64_t max_threads = std::numeric_limits<int32_t>::max();

MlaRotaryShape shape(int element_size, int64_t batch, int64_t tokens, int q_heads, int k_heads, int rotary_dim,
                     int q_copied, int k_copied) {
    return {.batch = batch,
            .tokens = tokens,
            .q_heads = q_heads,
            .k_heads = k_heads,
            .rotary_dim = rotary_dim,
            .q_copied = q_copied,
            .k_copied = k_copied,
            .element_size = element_size,
            .aligned_vector = full_vector(element_size)};
}

constexpr KeyTarget every_target[] = {KeyTarget::tensor, KeyTarget::cache, KeyTarget::float8_cache, KeyTarget::sum};

std::string describe(const MlaRotaryShape& s) {
    const char* targets[] = {"", " to a cache", " to a float8 cache", " gradient"};
    return std::to_string(s.element_size) + " bytes, batch " + std::to_string(s.batch) + " tokens " +
           std::to_string(s.tokens) + " heads " + std::to_string(s.q_heads) + "+" + std::to_string(s.k_heads) +
           " rotary_dim " + std::to_string(s.rotary_dim) + " copied " + std::to_string(s.q_copied) + "+" +
           std::to_string(s.k_copied) + " aligned by " + std::to_string(s.aligned_vector) +
           targets[static_cast<int>(s.target)];
}

// Calls f for training shapes, cache rows and odd ones.
template <class F>
void for_each_shape(int64_t batch, int64_t tokens, F&& f) {
    for (const int element_size : {2, 4, 8}) {
        for (const auto& [q_heads, k_heads] : {std::pair{128, 1}, {16, 16}, {5, 3}, {0, 1}, {3, 0}, {1, 1}}) {
            for (const int rotary_dim : {2, 6, 16, 48, 56, 64, 128}) {
                for (const auto& [q_copied, k_copied] : {std::pair{0, 512}, {128, 128}, {8, 24}, {3, 5}, {0, 0}}) {
                    for (const int aligned_vector : {full_vector(element_size), 1}) {
                        MlaRotaryShape s =
                            shape(element_size, batch, tokens, q_heads, k_heads, rotary_dim, q_copied, k_copied);
                        s.aligned_vector = aligned_vector;
                        for (const KeyTarget target : every_target) {
                            if (is_cache(target) && (k_heads != 1 || q_copied > 0)) continue;
                            if (target == KeyTarget::float8_cache && element_size == 8) continue;
                            if (target == KeyTarget::sum) s.k_copied = 0;
                            s.target = target;
                            SCOPED_TRACE(describe(s));
                            f(s);
                            if (::testing::Test::HasFailure()) return;
                        }
                    }
                }
            }
        }
    }
}

// --- invariants of every plan

// The vectors that there are kernels for, from the widest on.
std::vector<int> vectors_of_kernels(const MlaRotaryShape& s) {
    if (s.element_size == 2) return s.target == KeyTarget::sum ? std::vector{8, 1} : std::vector{8, 4, 1};
    return s.element_size == 4 && !is_cache(s.target) ? std::vector{4, 1} : std::vector{1};
}

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for (const auto& [batch, tokens] :
         {std::pair{int64_t{1}, int64_t{1}}, {64, 1}, {1, 8192}, {3, int64_t{1} << 31}, {int64_t{1} << 20, 1024}}) {
        for_each_shape(batch, tokens, [](const MlaRotaryShape& s) {
            const MlaRotaryPlan p = plan(s, h200);
            EXPECT_TRUE(has_plan(s, p.vector, p.heads_per_thread)) << "no kernel";
            int widest = 1;
            for (const int vector : vectors_of_kernels(s)) {
                const bool fits = vector <= s.aligned_vector && s.rotary_dim / 2 % vector == 0 &&
                                  s.q_copied % vector == 0 && s.k_copied % vector == 0;
                if (fits) widest = std::max(widest, vector);
            }
            const int full = 16 / s.element_size;
            const bool may_be_half = widest == full && s.element_size == 2 && s.target != KeyTarget::sum;
            EXPECT_TRUE(p.vector == widest || (may_be_half && p.vector == full / 2));
            EXPECT_EQ(p.heads_per_thread, p.vector == full && widest > 1 ? 2 : 1);
            EXPECT_EQ(p.rotating_lanes * p.vector, s.rotary_dim / 2);
            EXPECT_GE(p.q_groups * p.heads_per_thread, s.q_heads);
            EXPECT_LT((p.q_groups - 1) * p.heads_per_thread, s.q_heads);
            const int64_t threads = p.threads_per_token() + p.sum_threads_per_token() + p.latent_lanes;
            EXPECT_LE(p.tokens_per_launch * threads + 2 * mla_block_threads, max_threads);
            if (p.tokens_per_launch < s.batch * s.tokens) {
                EXPECT_LE(p.tokens_per_launch, s.tokens) << "a slice lies in one sequence";
            }
        });
    }
}

TEST(Plan, GivesThreadsLessWorkInSmallLaunches) {
    for (const KeyTarget target : every_target) {
        for (const int q_heads : {1, 16, 128}) {
            MlaRotaryShape s = shape(2, 1, 1, q_heads, 1, 64, 0, target == KeyTarget::sum ? 0 : 512);
            s.target = target;
            const MlaRotaryPlan few = plan(s, h200);
            s.tokens = 32768;
            const MlaRotaryPlan many = plan(s, h200);
            EXPECT_EQ(few.heads_per_thread, target == KeyTarget::sum ? 2 : 1);  // the gradient has one kernel
            EXPECT_EQ(few.vector, target == KeyTarget::sum ? 8 : 4);
            EXPECT_EQ(many.heads_per_thread, 2);
            EXPECT_EQ(many.vector, 8);
        }
    }
}

TEST(Plan, TakesHalfVectorsOfHeadsThatAreNotMadeOfFullOnes) {
    for (const int64_t tokens : {1, 8192}) {
        const MlaRotaryPlan p = plan(shape(2, 1, tokens, 16, 16, 56, 100, 100), h200);
        EXPECT_EQ(p.vector, 4);
        EXPECT_EQ(p.heads_per_thread, 1);
    }
}

// --- kernels

TEST(Kernels, Are14OfEach16BitTypeAndPairingAnd9Others) {
    int count[9] = {};
    for (const int element_size : {2, 4, 8}) {
        for (const KeyTarget target : every_target) {
            for (int vector = 0; vector <= 16; ++vector) {
                for (const int heads : {1, 2, 3}) {
                    for (const TableLookup lookup :
                         {TableLookup::single, TableLookup::indexed, TableLookup::position_rows}) {
                        if (!has_mla_kernel(element_size, target, vector, heads, lookup)) continue;
                        ++count[element_size];
                        // A call that has a kernel has one with several tables, too, and one of single components.
                        EXPECT_TRUE(has_mla_kernel(element_size, target, vector, heads, TableLookup::indexed));
                        EXPECT_TRUE(has_mla_kernel(element_size, target, 1, 1, TableLookup::indexed));
                    }
                }
            }
        }
    }
    EXPECT_EQ(count[2], 14);
    EXPECT_EQ(count[4], 6);
    EXPECT_EQ(count[8], 3);
}

// --- thread-to-element map of the kernels

// Counts how often each component of the heads of q, or of the key, is taken.
class Coverage {
public:
    Coverage(const MlaRotaryShape& s, bool of_queries)
        : heads_(of_queries ? s.q_heads : s.k_heads),
          copied_(of_queries ? s.q_copied : s.k_copied),
          head_dim_(copied_ + s.rotary_dim),
          tokens_(s.tokens),
          touched_(s.batch * s.tokens * heads_ * head_dim_) {}

    int heads() const { return heads_; }
    int copied() const { return copied_; }

    void touch(int64_t batch, int64_t token, int64_t head, int64_t component) {
        ASSERT_LT(component, head_dim_);
        ++touched_.at(((batch * tokens_ + token) * heads_ + head) * head_dim_ + component);
    }

    void expect_each_component_once() const {
        for (size_t i = 0; i < touched_.size(); ++i) {
            ASSERT_EQ(touched_[i], 1) << "component " << i % head_dim_ << " of head " << i / head_dim_ % heads_;
        }
    }

private:
    int heads_;
    int copied_;
    int head_dim_;
    int64_t tokens_;
    std::vector<int> touched_;
};

template <Pairing pairing, int Vector>
void take(const MlaRotaryMap<PlainDivmod>& map, const MlaRotaryPlan& plan, const MlaRotaryShape& s, int thread,
          Coverage& queries, Coverage& keys) {
    const MlaRotaryPlace place = map.place(thread);
    Coverage& heads = place.is_query ? queries : keys;
    const int half = s.rotary_dim / 2;
    const int lanes = place.is_query ? plan.q_lanes : plan.k_lanes;
    const MlaLaneLayout<pairing, Vector> layout(place.lane, half, lanes, is_cache(s.target) ? 0 : heads.copied());
    ASSERT_LT(place.group * plan.heads_per_thread, heads.heads()) << "an idle thread";
    for (int j = 0; j < plan.heads_per_thread; ++j) {
        const int head = place.group * plan.heads_per_thread + j;
        if (head >= heads.heads()) break;
        const auto touch = [&](int component) { heads.touch(place.batch, place.token, head, component); };
        if (layout.rotates()) {
            rotate_components<pairing, Vector>(layout, half, [&](int at) { touch(heads.copied() + at); });
            continue;
        }
        for (int i = 0; i < Vector; ++i) {
            touch(layout.first() + i);
            if (layout.second() != layout.first()) touch(layout.second() + i);
        }
    }
}

// The vectors of a thread that copies the latent part of a cache row.
void copy(const MlaLatentMap<PlainDivmod>& map, const MlaRotaryPlan& plan, int thread, Coverage& rows) {
    int batch, token, lane;
    map.place(batch, token, lane, thread);
    const CopyLayout layout{lane, plan.latent_lanes, rows.copied(), plan.vector};
    for (int i = 0; i < plan.vector; ++i) {
        rows.touch(batch, token, 0, layout.first() + i);
        if (layout.second() != layout.first()) rows.touch(batch, token, 0, layout.second() + i);
    }
}

TEST(Kernel, TakesEveryComponentOfEveryHeadOnce) {
    for_each_shape(2, 3, [](const MlaRotaryShape& s) {
        for (const MlaRotaryPlan& planned : plans_with_kernel(s)) {
            SCOPED_TRACE(describe_vectors(planned));
            const auto map = MlaRotaryMap<PlainDivmod>::of(planned, s.tokens);
            for (const Pairing pairing : both_pairings) {
                Coverage queries(s, true), keys(s, false);
                with_pairing_and_vector(pairing, planned.vector, [&]<Pairing p, int Vector>() {
                    for (int64_t thread = 0; thread < s.batch * s.tokens * planned.threads_per_token(); ++thread) {
                        take<p, Vector>(map, planned, s, static_cast<int>(thread), queries, keys);
                        if (::testing::Test::HasFailure()) return;
                    }
                });
                const auto latent = MlaLatentMap<PlainDivmod>::of(planned, s.tokens);
                for (int64_t thread = 0; thread < s.batch * s.tokens * planned.latent_lanes; ++thread) {
                    copy(latent, planned, static_cast<int>(thread), keys);
                }
                queries.expect_each_component_once();
                if (s.target != KeyTarget::sum) keys.expect_each_component_once();
                if (::testing::Test::HasFailure()) return;
            }
        }
    });
}

TEST(Kernel, AddsUpEveryHeadOnceInTheWarpOfItsToken) {
    for_each_shape(2, 3, [](const MlaRotaryShape& s) {
        if (s.target != KeyTarget::sum) return;
        for (const MlaRotaryPlan& planned : plans_with_kernel(s)) {
            EXPECT_EQ(planned.k_groups, 0);
            if (s.k_heads == 0) {
                EXPECT_EQ(planned.sum_threads_per_token(), 0);
                continue;
            }
            if (planned.head_sums > 1) {
                EXPECT_EQ(planned.sum_threads_per_token(), mla_warp_threads);
            }
            const auto map = MlaSumMap<PlainDivmod>::of(planned, s.tokens);
            std::vector<int> added(s.batch * s.tokens * s.k_heads * planned.rotating_lanes);
            for (int64_t thread = 0; thread < s.batch * s.tokens * planned.sum_threads_per_token(); ++thread) {
                const MlaSumPlace place = map.place(static_cast<int>(thread));
                const int64_t token = place.batch * s.tokens + place.token;
                EXPECT_EQ(token, thread / planned.sum_threads_per_token());
                for (int head = place.first_head; head < s.k_heads; head += planned.head_sums) {
                    ++added.at((token * s.k_heads + head) * planned.rotating_lanes + place.lane);
                }
            }
            for (const int times : added) ASSERT_EQ(times, 1);
        }
    });
}

// --- launches

TEST(Launches, TakeEveryTokenOnceAndEverySequenceToItsBlock) {
    for (const bool paged : {false, true}) {
        for (const int64_t per_launch : {1, 2, 5, 7, 21}) {
            MlaCacheOptions options;
            options.rotary.batch = 3;
            options.rotary.tokens = 7;
            options.rotary.in_place = true;
            options.paged = paged;
            options.blocks = 9;
            options.block_size = 30;
            MlaRotaryAndCacheCase cache(options);
            for_each_launch(cache.args(), per_launch,
                            [](const MlaRotaryAndCacheArgs& part) { mla_rotary_and_cache_cpu(part); });
            cache.expect_written();
        }
    }
}

TEST(Launches, TakeEveryTokenOfForwardAndGradientOnce) {
    for (const int64_t per_launch : {1, 2, 5, 7, 21}) {
        MlaOptions options;
        options.rotary.batch = 3;
        options.rotary.tokens = 7;
        options.rotary.tables = {.table_for = TableFor::each_sequence};
        MlaRotaryCase forward(options);
        for_each_launch(forward.args(), per_launch, [](const MlaRotaryArgs& part) { mla_rotary_cpu(part); });
        forward.expect_written();
        MlaRotaryGradientCase gradient(options);
        for_each_launch(gradient.args(), per_launch,
                        [](const MlaRotaryGradientArgs& part) { mla_rotary_gradient_cpu(part); });
        gradient.expect_written();
    }
}

// --- alignment

TEST(Alignment, IsLostByOneElementOfAnyTensor) {
    for (const StoredAs cached_as : every_stored_as) {
        MlaCacheOptions options;
        options.rotary.dtype = DType::bfloat16;
        options.rotary.head_dim = options.rotary.rotary_dim = 64;
        options.rotary.in_place = true;
        options.latent_dim = 512;
        options.cached_as = cached_as;
        MlaRotaryAndCacheCase cache(options);
        MlaRotaryAndCacheArgs aligned = cache.args();
        // Aligned, as the case's own vectors need not be.
        const auto address = [](uintptr_t value) { return reinterpret_cast<std::byte*>(value); };
        aligned.rotary.q.in = aligned.rotary.q.out = address(0x1000);
        aligned.rotary.k.in = address(0x2000);
        aligned.latent.view.in = address(0x3000);
        aligned.latent.view.out = address(0x4000);
        aligned.rotary.k.out = address(0x4000) + 512 * (is_float8(cached_as) ? 1 : 2);
        ASSERT_EQ(shape_of(aligned).aligned_vector, 8);
        const int cached = is_float8(cached_as) ? 1 : 2;
        for (const int elements : {1, 2, 4}) {
            for (const auto& [member, bytes] : {std::pair{0, 2}, {1, 2}, {2, 2}, {3, cached}, {4, cached}}) {
                MlaRotaryAndCacheArgs args = aligned;
                const auto move = [by = elements * bytes](auto*& pointer) {
                    pointer = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(pointer) + by);
                };
                if (member == 0) move(args.rotary.q.out);
                if (member == 1) move(args.rotary.k.in);
                if (member == 2) move(args.latent.view.in);
                if (member == 3) move(args.latent.view.out);
                if (member == 4) move(args.rotary.k.out);
                EXPECT_EQ(shape_of(args).aligned_vector, elements) << member;
            }
            MlaRotaryAndCacheArgs args = aligned;
            args.latent.view.out_strides.token += elements;
            EXPECT_EQ(shape_of(args).aligned_vector, elements);
            args = aligned;
            args.rotary.q.in_strides.head += elements;
            EXPECT_EQ(shape_of(args).aligned_vector, elements);
        }
    }
}

}  // namespace
}  // namespace mrrope
