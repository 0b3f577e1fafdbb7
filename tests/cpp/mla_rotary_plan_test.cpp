#include "mla_rotary_plan.h"

#include <gtest/gtest.h>

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
            .aligned = true};
}

std::string describe(const MlaRotaryShape& s) {
    return std::to_string(s.element_size) + " bytes, batch " + std::to_string(s.batch) + " tokens " +
           std::to_string(s.tokens) + " heads " + std::to_string(s.q_heads) + "+" + std::to_string(s.k_heads) +
           " rotary_dim " + std::to_string(s.rotary_dim) + " copied " + std::to_string(s.q_copied) + "+" +
           std::to_string(s.k_copied) + (s.aligned ? "" : " misaligned") + (s.to_cache ? " to a cache" : "");
}

// Calls f for training shapes, cache rows and odd ones.
template <class F>
void for_each_shape(int64_t batch, int64_t tokens, F&& f) {
    for (const int element_size : {2, 4, 8}) {
        for (const auto& [q_heads, k_heads] : {std::pair{128, 1}, {16, 16}, {5, 3}, {0, 1}, {3, 0}, {1, 1}}) {
            for (const int rotary_dim : {2, 6, 16, 48, 64, 128}) {
                for (const auto& [q_copied, k_copied] : {std::pair{0, 512}, {128, 128}, {8, 24}, {3, 5}, {0, 0}}) {
                    for (const bool aligned : {true, false}) {
                        MlaRotaryShape s =
                            shape(element_size, batch, tokens, q_heads, k_heads, rotary_dim, q_copied, k_copied);
                        s.aligned = aligned;
                        for (const bool to_cache : {false, true}) {
                            if (to_cache && (k_heads != 1 || q_copied > 0)) continue;
                            s.to_cache = to_cache;
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

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for (const auto& [batch, tokens] :
         {std::pair{int64_t{1}, int64_t{1}}, {64, 1}, {1, 8192}, {3, int64_t{1} << 31}, {int64_t{1} << 20, 1024}}) {
        for_each_shape(batch, tokens, [](const MlaRotaryShape& s) {
            const int full = 16 / s.element_size;
            const bool fits =
                s.aligned && s.rotary_dim / 2 % full == 0 && s.q_copied % full == 0 && s.k_copied % full == 0;
            MlaRotaryShape with_gradient = s;  // a cache has none
            with_gradient.to_cache = false;
            for (const MlaRotaryPlan& p : {plan(s, h200), gradient_plan(with_gradient, h200)}) {
                const bool is_full = p.vector == full;
                EXPECT_TRUE(fits ? is_full || p.vector == full / 2 : p.vector == 1);
                EXPECT_EQ(p.rotating_lanes * p.vector, s.rotary_dim / 2);
                // The combinations that are instantiated.
                EXPECT_TRUE(p.heads_per_thread == 1 || (p.heads_per_thread == 2 && is_full && fits));
                EXPECT_GE(p.q_groups * p.heads_per_thread, s.q_heads);
                EXPECT_LT((p.q_groups - 1) * p.heads_per_thread, s.q_heads);
                const int64_t threads = p.threads_per_token() + p.sum_threads_per_token() + p.latent_lanes;
                EXPECT_LE(p.tokens_per_launch * threads + 2 * mla_block_threads, max_threads);
                if (p.tokens_per_launch < s.batch * s.tokens) {
                    EXPECT_LE(p.tokens_per_launch, s.tokens) << "a slice lies in one sequence";
                }
            }
        });
    }
}

TEST(Plan, GivesThreadsLessWorkInSmallLaunches) {
    for (const int q_heads : {16, 128}) {
        const MlaRotaryPlan few = plan(shape(2, 1, 1, q_heads, 1, 64, 0, 512), h200);
        EXPECT_EQ(few.heads_per_thread, 1);
        EXPECT_EQ(few.vector, 4);
        const MlaRotaryPlan many = plan(shape(2, 1, 8192, q_heads, 1, 64, 0, 512), h200);
        EXPECT_EQ(many.heads_per_thread, 2);
        EXPECT_EQ(many.vector, 8);
    }
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
    const MlaLaneLayout<pairing, Vector> layout(place.lane, half, lanes, s.to_cache ? 0 : heads.copied());
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
        const int smallest = plan(s, h200).vector;  // a small call: half vectors, or single components
        const int full = 16 / s.element_size;
        const bool has_full = smallest == full / 2 && full > 1 && s.rotary_dim / 2 % full == 0 &&
                              s.q_copied % full == 0 && s.k_copied % full == 0;
        for (const auto& [vector, heads_per_thread] : {std::pair{smallest, 1}, {full, 1}, {full, 2}}) {
            if (vector != smallest && !has_full) continue;
            const MlaRotaryPlan planned = plan_with(s, vector, heads_per_thread);
            const auto map = MlaRotaryMap<PlainDivmod>::of(planned, s.tokens);
            for (const Pairing pairing : both_pairings) {
                Coverage queries(s, true), keys(s, false);
                with_pairing_and_vector(pairing, vector, [&]<Pairing p, int Vector>() {
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
                keys.expect_each_component_once();
                if (::testing::Test::HasFailure()) return;
            }
        }
    });
}

TEST(Kernel, AddsUpEveryHeadOnceInTheWarpOfItsToken) {
    for_each_shape(2, 3, [](const MlaRotaryShape& s) {
        const MlaRotaryPlan planned = gradient_plan(s, h200);
        EXPECT_EQ(planned.k_groups, 0);
        if (s.k_heads == 0) {
            EXPECT_EQ(planned.sum_threads_per_token(), 0);
            return;
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
        ASSERT_TRUE(shape_of(aligned).aligned);
        const int cached = is_float8(cached_as) ? 1 : 2;
        for (const auto& [member, bytes] : {std::pair{0, 2}, {1, 2}, {2, 2}, {3, cached}, {4, cached}}) {
            MlaRotaryAndCacheArgs args = aligned;
            const auto move = [bytes = bytes](auto*& pointer) {
                pointer = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(pointer) + bytes);
            };
            if (member == 0) move(args.rotary.q.out);
            if (member == 1) move(args.rotary.k.in);
            if (member == 2) move(args.latent.view.in);
            if (member == 3) move(args.latent.view.out);
            if (member == 4) move(args.rotary.k.out);
            EXPECT_FALSE(shape_of(args).aligned) << member;
        }
        MlaRotaryAndCacheArgs args = aligned;
        args.latent.view.out_strides.token += 1;
        EXPECT_FALSE(shape_of(args).aligned);
        args = aligned;
        args.rotary.q.in_strides.head += 1;
        EXPECT_FALSE(shape_of(args).aligned);
    }
}

}  // namespace
}  // namespace mrrope
