#include "rescale_cache_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "devices.h"
#include "elements.h"
#include "head_split.h"
#include "kernel_lanes.h"
#include "rescale_cache_map.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

// Contiguous keys. Pointers serve address arithmetic only and are never dereferenced.
class Keys {
public:
    Keys(DType dtype, int layers, int64_t tokens, int heads, int rotary_dim, bool aligned) {
        const int64_t misalignment = aligned ? 0 : size_of(dtype);
        for (int layer = 0; layer < layers; ++layer) {
            pointers_.push_back(reinterpret_cast<void*>(uintptr_t{4096} * (layer + 1) + misalignment));
        }
        args_.keys = pointers_;
        args_.strides = {.batch = tokens * heads * rotary_dim, .token = heads * rotary_dim, .head = rotary_dim};
        args_.batch = 1;
        args_.tokens = tokens;
        args_.heads = heads;
        args_.rotary_dim = rotary_dim;
        args_.dtype = dtype;
    }
    Keys(const Keys&) = delete;
    Keys& operator=(const Keys&) = delete;

    std::vector<void*>& pointers() { return pointers_; }
    RescaleCacheArgs& args() { return args_; }

private:
    std::vector<void*> pointers_;
    RescaleCacheArgs args_;
};

RescaleCachePlan plan_of(const RescaleCacheArgs& args) {
    return plan(shape_of(args), h200);
}

std::string describe(const RescaleCacheArgs& args) {
    return std::string(name_of(args.dtype)) + " layers " + std::to_string(args.keys.size()) + " tokens " +
           std::to_string(args.tokens) + " heads " + std::to_string(args.heads) + " rotary_dim " +
           std::to_string(args.rotary_dim);
}

// --- invariants of every plan

TEST(Plan, SatisfiesItsInvariantsForEveryShape) {
    for (const DType dtype : all_dtypes) {
        for (const bool aligned : {false, true}) {
            for (const int layers : {1, 2, 32, 127, max_layers_per_launch}) {
                for (const int heads : {1, 2, 3, 8, 40, 71, 128}) {
                    for (const int rotary_dim : {2, 6, 16, 34, 64, 80, 128, 256, 512}) {
                        for (const int64_t tokens :
                             {int64_t{1}, int64_t{17}, int64_t{131072}, (int64_t{1} << 31) - 1, int64_t{1} << 31,
                              (int64_t{1} << 31) + 1, int64_t{1} << 33, int64_t{1} << 40}) {
                            Keys keys(dtype, layers, tokens, heads, rotary_dim, aligned);
                            const RescaleCachePlan plan = plan_of(keys.args());
                            SCOPED_TRACE(describe(keys.args()));
                            const int full = full_vector(size_of(dtype));
                            const bool fits = aligned && rotary_dim / 2 % full == 0;
                            EXPECT_EQ(plan.vector, fits ? full : 1);
                            EXPECT_EQ(plan.lanes * plan.vector, rotary_dim / 2);
                            EXPECT_GE(plan.head_groups * rescale_cache_heads_per_thread, heads);
                            EXPECT_LT((plan.head_groups - 1) * rescale_cache_heads_per_thread, heads);

                            // At least one token at a time, and fewer idle threads than a token takes.
                            const int64_t per_token = int64_t{plan.lanes} * plan.head_groups;
                            const int64_t threads = int64_t{plan.blocks} * rescale_cache_block_threads;
                            ASSERT_LE(threads, std::numeric_limits<int32_t>::max()) << "threads are counted in 32 bits";
                            ASSERT_GE(plan.token_step, 1);
                            EXPECT_LE(plan.token_step * per_token, threads);
                            EXPECT_GT((plan.token_step + 1) * per_token, threads);

                            // As many blocks as there is work for, at most one wave, but at least enough for one token.
                            const int64_t one_token =
                                (per_token + rescale_cache_block_threads - 1) / rescale_cache_block_threads;
                            const int64_t blocks = plan.blocks;
                            if (blocks > one_token) {
                                EXPECT_LT((blocks - 1) * rescale_cache_block_threads, tokens * per_token);
                                EXPECT_LE(blocks, h200.sms * rescale_cache_min_blocks_per_sm);
                            }
                            if (tokens * per_token > threads) {
                                EXPECT_GE(blocks, h200.sms * rescale_cache_min_blocks_per_sm);
                            }
                            if (HasFailure()) return;
                        }
                    }
                }
            }
        }
    }
}

TEST(Plan, FillsTheSmsOfTheDevice) {
    Keys keys(DType::bfloat16, 32, 131072, 8, 128, true);
    for (const Device& device : {h200, a100}) {
        EXPECT_EQ(plan(shape_of(keys.args()), device).blocks, device.sms * rescale_cache_min_blocks_per_sm);
    }
}

// --- thread-to-element map of the kernel

// Counts how often each component of one layer's sequence is rotated, over all threads.
class Coverage {
public:
    Coverage(const RescaleCacheArgs& args, const RescaleCachePlan& plan)
        : args_(args), plan_(plan), touched_(args.tokens * args.heads * args.rotary_dim) {}

    void run() {
        const int threads = plan_.blocks * rescale_cache_block_threads;
        with_pairing_and_vector(args_.pairing, plan_.vector, [&]<Pairing pairing, int Vector>() {
            for (int thread = 0; thread < threads; ++thread) run<pairing, Vector>(thread);
        });
    }

    void expect_each_component_once() const {
        for (size_t i = 0; i < touched_.size(); ++i) {
            ASSERT_EQ(touched_[i], 1) << "component " << i % args_.rotary_dim << " of head "
                                      << i / args_.rotary_dim % args_.heads << " of token "
                                      << i / args_.rotary_dim / args_.heads;
        }
    }

private:
    template <Pairing pairing, int Vector>
    void run(int thread) {
        const RescaleCachePlace place(plan_, thread);
        if (place.first_token >= plan_.token_step) return;
        const int half = args_.rotary_dim / 2;
        const LaneLayout<pairing, Vector> layout{place.lane, half};
        const StridedHeads of_thread = place.heads_of_group(plan_, args_.heads);
        const int heads = of_thread.count();
        ASSERT_GE(heads, 1) << "an idle thread";
        ASSERT_LE(heads, rescale_cache_heads_per_thread);
        for (int64_t token = place.first_token; token < args_.tokens; token += plan_.token_step) {
            for (int j = 0; j < heads; ++j) {
                const int64_t head = of_thread.head(j);
                ASSERT_EQ(of_thread.table, head / (args_.heads / args_.table_heads)) << head;
                rotate_components<pairing, Vector>(
                    layout, half, [&](int at) { ++touched_.at((token * args_.heads + head) * args_.rotary_dim + at); });
            }
        }
    }

    RescaleCacheArgs args_;
    RescaleCachePlan plan_;
    std::vector<int> touched_;
};

void expect_each_component_once(RescaleCacheArgs args) {
    const RescaleCachePlan plan = plan_of(args);
    for (const Pairing pairing : both_pairings) {
        args.pairing = pairing;
        SCOPED_TRACE(describe(args));
        Coverage kernel(args, plan);
        kernel.run();
        kernel.expect_each_component_once();
    }
}

TEST(Kernel, RotatesEveryComponentOfEveryHeadOnce) {
    for (const DType dtype : {DType::float64, DType::float32, DType::bfloat16}) {
        for (const bool aligned : {false, true}) {
            for (const int heads : {1, 2, 3, 4, 5, 8, 9, 40, 71}) {
                for (const int rotary_dim : {2, 4, 6, 10, 16, 24, 34, 64, 80, 96, 100, 128, 256}) {
                    for (const int64_t tokens : {1, 2, 7}) {
                        Keys keys(dtype, 2, tokens, heads, rotary_dim, aligned);
                        expect_each_component_once(keys.args());
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

TEST(Kernel, GivesEveryHeadItsTable) {
    for (const int table_heads : {2, 3, 8}) {
        for (const int heads_per_table : {1, 2, 4, 5, 9}) {
            for (const int rotary_dim : {6, 64, 128}) {
                Keys keys(DType::bfloat16, 2, 7, table_heads * heads_per_table, rotary_dim, true);
                RescaleCacheArgs args = keys.args();
                args.table_heads = table_heads;
                expect_each_component_once(args);
                if (HasFailure()) return;
            }
        }
    }
}

TEST(Launches, KeepTheTableOfEveryLayer) {
    Keys keys(DType::bfloat16, 2 * max_layers_per_launch + 3, 1, 1, 16, true);
    RescaleCacheArgs args = keys.args();
    std::vector<int32_t> layer_of_keys;
    for (size_t layer = 0; layer < args.keys.size(); ++layer) layer_of_keys.push_back(static_cast<int32_t>(7 * layer));
    args.table_layers = 1 << 12;
    args.layer_of_keys = layer_of_keys;
    size_t seen = 0;
    for_each_rescale_launch(args, [&](const RescaleCacheArgs& part) {
        ASSERT_EQ(part.layer_of_keys.size(), part.keys.size());
        for (size_t i = 0; i < part.keys.size(); ++i, ++seen) {
            EXPECT_EQ(part.keys[i], args.keys[seen]);
            EXPECT_EQ(part.layer_of_keys[i], layer_of_keys[seen]);
        }
    });
    EXPECT_EQ(seen, args.keys.size());
}

TEST(Kernel, TakesTokensThatNeedMoreThreadsThanABlock) {
    for (const int heads : {71, 128}) {
        for (const int64_t tokens : {1, 2, 5}) {
            for (const int layers : {1, max_layers_per_launch}) {
                Keys keys(DType::float64, layers, tokens, heads, 512, false);
                const RescaleCachePlan plan = plan_of(keys.args());
                ASSERT_GT(plan.lanes * plan.head_groups, rescale_cache_block_threads);
                expect_each_component_once(keys.args());
                if (HasFailure()) return;
            }
        }
    }
}

TEST(Kernel, LoopsOverMoreTokensThanItHasThreadsFor) {
    for (const int layers : {32, 100, max_layers_per_launch}) {
        for (const auto& [heads, rotary_dim] : {std::pair{8, 64}, {3, 100}, {1, 6}, {7, 128}}) {
            for (const int64_t extra : {-1, 0, 1, 50}) {
                Keys few(DType::float32, layers, 1 << 20, heads, rotary_dim, false);
                const int64_t tokens = 2 * plan_of(few.args()).token_step + extra;
                Keys keys(DType::float32, layers, tokens, heads, rotary_dim, false);
                ASSERT_LT(plan_of(keys.args()).token_step, tokens);
                expect_each_component_once(keys.args());
                if (HasFailure()) return;
            }
        }
    }
}

// --- launches

TEST(Launches, TakeEveryLayerOnceInOrder) {
    for (const int layers : {0, 1, 2, max_layers_per_launch - 1, max_layers_per_launch, max_layers_per_launch + 1,
                             3 * max_layers_per_launch, 3 * max_layers_per_launch + 5}) {
        Keys keys(DType::bfloat16, layers, 3, 2, 64, true);
        std::vector<void*> launched;
        int launches = 0;
        for_each_rescale_launch(keys.args(), [&](const RescaleCacheArgs& part) {
            ++launches;
            EXPECT_GE(part.keys.size(), 1u);
            EXPECT_LE(part.keys.size(), static_cast<size_t>(max_layers_per_launch));
            EXPECT_EQ(part.tokens, 3);
            EXPECT_EQ(part.heads, 2);
            launched.insert(launched.end(), part.keys.begin(), part.keys.end());
        });
        EXPECT_EQ(launched, keys.pointers()) << layers;
        EXPECT_EQ(launches, (layers + max_layers_per_launch - 1) / max_layers_per_launch);
    }
}

// --- alignment

TEST(Alignment, OfEveryLayerGivesFullVectors) {
    for (const DType dtype : all_dtypes) {
        Keys keys(dtype, 5, 3, 2, 64, true);
        EXPECT_EQ(plan_of(keys.args()).vector, full_vector(size_of(dtype))) << name_of(dtype);
    }
}

TEST(Alignment, IsLostByOneElementOfAnyLayer) {
    for (const DType dtype : all_dtypes) {
        for (int layer = 0; layer < 5; ++layer) {
            Keys keys(dtype, 5, 3, 2, 64, true);
            keys.pointers()[layer] = static_cast<char*>(keys.pointers()[layer]) + size_of(dtype);
            EXPECT_EQ(plan_of(keys.args()).vector, 1) << name_of(dtype) << " " << layer;
        }
    }
}

TEST(Alignment, IsLostByOneElementOfAnyStride) {
    for (const DType dtype : all_dtypes) {
        for (int64_t HeadStrides::* const stride : {&HeadStrides::batch, &HeadStrides::token, &HeadStrides::head}) {
            Keys keys(dtype, 2, 3, 2, 64, true);
            keys.args().strides.*stride += 1;
            EXPECT_EQ(plan_of(keys.args()).vector, 1) << name_of(dtype);
            keys.args().strides.*stride += 16 / size_of(dtype) - 1;
            EXPECT_EQ(plan_of(keys.args()).vector, full_vector(size_of(dtype))) << name_of(dtype);
        }
    }
}

}  // namespace
}  // namespace mrrope
