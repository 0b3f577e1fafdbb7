#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "device_case.h"
#include "device_memory.h"
#include "device_properties.h"
#include "every_norm_plan.h"
#include "head_split.h"
#include "mrrope/qk_norm_rotary.h"
#include "on_gpu.h"
#include "qk_norm_rotary_case.h"
#include "qk_norm_rotary_plan.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

// A case on the device: its buffers, with the noise around the heads, copied there and back.
class NormOnDevice {
public:
    explicit NormOnDevice(NormCase& norm)
        : norm_(norm),
          rotary_(norm.rotary()),
          q_weights_(norm.weights(true).bytes),
          k_weights_(norm.weights(false).bytes),
          q_gradient_(norm.gradient(true).bytes),
          k_gradient_(norm.gradient(false).bytes) {}

    QkNormRotaryArgs args() {
        QkNormRotaryArgs args = norm_.args();
        args.rotary = rotary_.args();
        args.q_weight = q_weights_.data() + norm_.weights(true).first_byte;
        if (args.k_weight != nullptr) args.k_weight = k_weights_.data() + norm_.weights(false).first_byte;
        return args;
    }

    QkNormRotaryGradientArgs gradient_args() {
        QkNormRotaryGradientArgs args = norm_.gradient_args();
        args.call = this->args();
        args.q.data = q_gradient_.data() + norm_.gradient(true).first_byte;
        if (args.k.data != nullptr) args.k.data = k_gradient_.data() + norm_.gradient(false).first_byte;
        return args;
    }

    void norm() { norm_by(plan(shape_of(args()), current_device())); }

    void norm_by(const QkNormRotaryPlan& plan) {
        qk_norm_rotary_cuda(args(), plan, nullptr);
        rotary_.fetch();
    }

    void differentiate() {
        differentiate(weight_sum_rows_cuda(gradient_args()),
                      [](const QkNormRotaryGradientArgs& args) { qk_norm_rotary_gradient_cuda(args, nullptr); });
    }

    void differentiate_by(const QkNormRotaryGradientPlan& plan) {
        differentiate({plan.q_blocks, plan.k_blocks},
                      [&](const QkNormRotaryGradientArgs& args) { qk_norm_rotary_gradient_cuda(args, plan, nullptr); });
    }

    DeviceCase& rotary() { return rotary_; }

private:
    void differentiate(const WeightSumRows& rows, const std::function<void(const QkNormRotaryGradientArgs&)>& op) {
        QkNormRotaryGradientArgs args = gradient_args();
        norm_.allocate_weight_gradients(rows);
        const DeviceMemory q_sums(norm_.weight_sums(true));
        const DeviceMemory k_sums(norm_.weight_sums(false));
        const DeviceMemory q_weights(norm_.weight_gradient(true));
        const DeviceMemory k_weights(norm_.weight_gradient(false));
        if (norm_.options().wants_weight_gradients) {
            args.q.weight_sums = q_sums.data();
            args.k.weight_sums = k_sums.data();
            args.q.weights = q_weights.data();
            args.k.weights = k_weights.data();
        }
        op(args);
        rotary_.fetch();
        q_weights.download(norm_.weight_gradient(true));
        k_weights.download(norm_.weight_gradient(false));
    }

    NormCase& norm_;
    DeviceCase rotary_;
    DeviceMemory q_weights_, k_weights_, q_gradient_, k_gradient_;
};

class QkNormRotaryCuda : public OnGpu {
protected:
    static void norm_and_expect(const NormCaseOptions& options) {
        NormCase norm(options);
        NormOnDevice(norm).norm();
        norm.expect_normed();
    }

    // By every kernel that there is for the case.
    static void norm_by_every_plan_and_expect(const NormCaseOptions& options) {
        for (const QkNormRotaryPlan& plan : every_norm_plan(shape_of(NormCase(options).args()), current_device())) {
            SCOPED_TRACE(plan.in_registers ? plan.heads_per_thread : 0);
            NormCase norm(options);
            NormOnDevice(norm).norm_by(plan);
            norm.expect_normed();
        }
    }

    static void differentiate_and_expect(NormCaseOptions options) {
        options.rotary.in_place = false;
        NormCase norm(options);
        NormOnDevice(norm).differentiate();
        norm.expect_gradients();
    }

    // As a GPU with one SM would, too: its few blocks have many rows each.
    static void differentiate_by_every_plan_and_expect(NormCaseOptions options) {
        options.rotary.in_place = false;
        const QkNormRotaryShape shape = shape_of(NormCase(options).gradient_args());
        for (const int sms : {1, current_device().sms}) {
            for (const auto& plan : every_gradient_plan(shape, {.sms = sms, .pdl = current_device().pdl})) {
                SCOPED_TRACE(std::string(plan.in_registers ? "in registers, SMs " : "two passes, SMs ") +
                             std::to_string(sms));
                NormCase norm(options);
                NormOnDevice(norm).differentiate_by(plan);
                norm.expect_gradients();
            }
        }
    }
};

// --- against the reference that the CPU implementation is tested against

TEST_F(QkNormRotaryCuda, RandomCases) {
    for (uint64_t seed = 1; seed <= 250 && !HasFailure(); ++seed) norm_and_expect(random_norm_options(seed));
}

TEST_F(QkNormRotaryCuda, GradientsOfRandomCases) {
    for (uint64_t seed = 1; seed <= 200 && !HasFailure(); ++seed) differentiate_and_expect(random_norm_options(seed));
}

TEST_F(QkNormRotaryCuda, EveryKind) {
    for_each_kind_of_norm([](NormCaseOptions o) {
        norm_and_expect(o);
        o.rotary.in_place = true;
        norm_and_expect(o);
        differentiate_by_every_plan_and_expect(o);
    });
}

TEST_F(QkNormRotaryCuda, SmallHeadsAreLiftedAsFarAsEpsLets) {
    NormCaseOptions o;
    for (const double eps : {0.0, 100.0}) {
        o.eps = eps;
        norm_and_expect(o);
        differentiate_and_expect(o);
    }
}

// Every number of heads per thread, with a remainder, and two passes; one table and several; full and partial rotation;
// teams with threads that hold nothing (head_dim 96), and more pairs than a block has threads (256).
TEST_F(QkNormRotaryCuda, EveryKernel) {
    NormCaseOptions o;
    o.rotary.tokens = 11;
    o.rotary.q_heads = 13;
    o.rotary.k_heads = 3;
    o.rotary.in_place = true;
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const auto& [head_dim, rotary_dim] : {std::pair{64, 64}, {64, 32}, {96, 96}, {256, 256}, {256, 128}}) {
                for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
                    o.rotary.dtype = dtype;
                    o.rotary.pairing = pairing;
                    o.rotary.head_dim = head_dim;
                    o.rotary.rotary_dim = rotary_dim;
                    o.over = over;
                    o.rotary.tables = {};
                    o.rotary.position_rows = 0;
                    for (const bool is_other : {false, true}) {
                        o.weight_offset = is_other ? 1.0 : 0.0;
                        o.rotary.conjugate = is_other;
                        norm_by_every_plan_and_expect(o);
                    }
                    o.rotary.tables = {.table_for = TableFor::each_index, .count = 3};
                    for (const int rows : {0, 3, max_rows_with_vectors}) {
                        o.rotary.position_rows = rows;
                        norm_by_every_plan_and_expect(o);
                        if (head_dim == 64) differentiate_by_every_plan_and_expect(o);
                    }
                    if (HasFailure()) return;
                }
            }
        }
    }
}

TEST_F(QkNormRotaryCuda, HeadTablesByEveryKernel) {
    for (const DType dtype : all_dtypes) {
        for (const Pairing pairing : both_pairings) {
            for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
                for (const auto& [tables, q_per_table, k_per_table, has_query_factors] :
                     {std::tuple{8, 4, 1, true}, {3, 3, 1, false}, {2, 1, 3, true}, {1, 5, 2, true}}) {
                    for (const int64_t rows : {0, 3}) {
                        NormCaseOptions o;
                        o.over = over;
                        o.rotary.dtype = dtype;
                        o.rotary.pairing = pairing;
                        o.rotary.tokens = 11;
                        o.rotary.q_heads = tables * q_per_table;
                        o.rotary.k_heads = tables * k_per_table;
                        o.rotary.head_dim = 96;
                        o.rotary.rotary_dim = 64;
                        o.rotary.position_rows = rows;
                        o.rotary.tables = {.count = 2, .heads = tables, .has_query_factors = has_query_factors};
                        for (const TableFor table_for : {TableFor::each_index, TableFor::all}) {
                            o.rotary.tables.table_for = table_for;
                            norm_by_every_plan_and_expect(o);
                            differentiate_by_every_plan_and_expect(o);
                        }
                        if (HasFailure()) return;
                    }
                }
            }
        }
    }
}

// Several rows per block.
TEST_F(QkNormRotaryCuda, GradientsOfManyTokens) {
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        for (const int64_t misalignment : {0, 1}) {
            NormCaseOptions o;
            o.over = over;
            o.rotary.dtype = DType::bfloat16;
            o.rotary.tokens = 3300;
            o.rotary.q_heads = 3;
            o.rotary.k_heads = 1;
            o.rotary.head_dim = o.rotary.rotary_dim = 256;
            o.rotary.in.misalignment = misalignment;
            NormCase norm(o);
            const QkNormRotaryGradientPlan plan = plan_gradient(shape_of(norm.gradient_args()), current_device());
            ASSERT_EQ(plan.in_registers, misalignment == 0);
            const int64_t rows_per_block =
                plan.in_registers && over == NormOver::head ? plan.block_threads / plan.team : 1;
            ASSERT_GT(o.rotary.tokens * (over == NormOver::head ? plan.q_groups : 1), plan.q_blocks * rows_per_block)
                << "blocks must have more than one row each";
            differentiate_and_expect(o);
        }
    }
}

// --- streams and launches

TEST_F(QkNormRotaryCuda, OneLaunchThatAGraphCanReplay) {
    const Stream stream;
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        NormCaseOptions o;
        o.over = over;
        o.rotary.head_dim = 96;
        o.rotary.rotary_dim = 64;
        NormCase norm(o);
        NormOnDevice device(norm);
        const Recording recording(stream, [&](cudaStream_t on) { qk_norm_rotary_cuda(device.args(), on); });
        EXPECT_EQ(recording.launches(), 1u);
        recording.play(stream);
        device.rotary().fetch();
        norm.expect_normed();
    }
}

TEST_F(QkNormRotaryCuda, WeightGradientsComeOutTheSameEveryTime) {
    for (const NormOver over : {NormOver::head, NormOver::all_heads}) {
        NormCaseOptions o;
        o.over = over;
        o.rotary.dtype = DType::bfloat16;
        o.rotary.tokens = 300;
        o.rotary.head_dim = o.rotary.rotary_dim = 64;
        std::vector<std::byte> first;
        for (int i = 0; i < 5; ++i) {
            NormCase norm(o);
            NormOnDevice(norm).differentiate();
            if (i == 0) first = norm.weight_gradient(true);
            EXPECT_EQ(norm.weight_gradient(true), first);
        }
    }
}

TEST_F(QkNormRotaryCuda, EmptyTensorsLaunchNothing) {
    const Stream stream;
    for (const auto& [batch, tokens, heads] : {std::tuple{0, 5, 2}, {2, 0, 2}, {2, 5, 0}}) {
        QkNormRotaryGradientArgs args;
        args.call.rotary.batch = batch;
        args.call.rotary.tokens = tokens;
        args.call.rotary.q.heads = heads;
        args.call.rotary.head_dim = args.call.rotary.rotary_dim = 64;
        const Recording recording(stream, [&](cudaStream_t on) {
            qk_norm_rotary_cuda(args.call, on);
            qk_norm_rotary_gradient_cuda(args, on);
        });
        EXPECT_EQ(recording.launches(), 0u) << batch << " " << tokens << " " << heads;
    }
}

}  // namespace
}  // namespace mrrope
