#include <gtest/gtest.h>

#include <vector>

#include "mrrope/qk_norm_rotary.h"
#include "qk_norm_rotary_case.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

void norm_and_expect(const NormCaseOptions& options) {
    NormCase norm(options);
    qk_norm_rotary_cpu(norm.args());
    norm.expect_normed();
}

void differentiate_and_expect(NormCaseOptions options, const ParallelFor& parallel_for = on_all_cores) {
    options.rotary.in_place = false;
    NormCase norm(options);
    QkNormRotaryGradientArgs args = norm.gradient_args();
    norm.allocate_weight_gradients(weight_sum_rows_cpu(args));
    if (options.wants_weight_gradients) {
        for (const bool is_q : {true, false}) {
            OutputGradient& gradient = is_q ? args.q : args.k;
            gradient.weight_sums = norm.weight_sums(is_q).data();
            gradient.weights = norm.weight_gradient(is_q).data();
        }
    }
    qk_norm_rotary_gradient_cpu(args, parallel_for);
    norm.expect_gradients();
}

TEST(QkNormRotaryCpu, RandomCases) {
    for (uint64_t seed = 1; seed <= 400 && !HasFailure(); ++seed) norm_and_expect(random_norm_options(seed));
}

TEST(QkNormRotaryCpu, GradientsOfRandomCases) {
    for (uint64_t seed = 1; seed <= 300 && !HasFailure(); ++seed) differentiate_and_expect(random_norm_options(seed));
}

TEST(QkNormRotaryCpu, EveryKind) {
    for_each_kind_of_norm([](NormCaseOptions o) {
        norm_and_expect(o);
        o.rotary.in_place = true;
        norm_and_expect(o);
        differentiate_and_expect(o);
    });
}

TEST(QkNormRotaryCpu, EveryGroupOfHeadsHasItsTable) {
    for_each_kind_of_norm([](NormCaseOptions o) {
        o.rotary.tables = {.table_for = TableFor::each_index, .count = 2, .padding = 1, .heads = 2};
        o.rotary.q_heads = 6;
        o.rotary.k_heads = 2;
        norm_and_expect(o);
        differentiate_and_expect(o);
    });
}

TEST(QkNormRotaryCpu, LargeAndZeroEps) {
    NormCaseOptions o;
    o.eps = 100.0;
    norm_and_expect(o);
    differentiate_and_expect(o);
    o.eps = 0.0;
    norm_and_expect(o);
    differentiate_and_expect(o);
}

TEST(QkNormRotaryCpu, MoreTokensThanSums) {
    NormCaseOptions o;
    o.rotary.tokens = 150;
    differentiate_and_expect(o);
}

// Tokens are summed in the same order on any number of threads.
TEST(QkNormRotaryCpu, WeightGradientsDoNotDependOnTheThreads) {
    NormCaseOptions o;
    o.rotary.tokens = 200;
    o.rotary.batch = 2;
    std::vector<std::byte> gradients[2];
    const ParallelFor in_one_go = [](int64_t count, int64_t, const RangeBody& body) { body(0, count); };
    const ParallelFor backwards = [](int64_t count, int64_t, const RangeBody& body) {
        for (int64_t at = count - 1; at >= 0; --at) body(at, at + 1);
    };
    for (const int i : {0, 1}) {
        NormCase norm(o);
        QkNormRotaryGradientArgs args = norm.gradient_args();
        norm.allocate_weight_gradients(weight_sum_rows_cpu(args));
        args.q.weight_sums = norm.weight_sums(true).data();
        args.q.weights = norm.weight_gradient(true).data();
        qk_norm_rotary_gradient_cpu(args, i == 0 ? in_one_go : backwards);
        gradients[i] = norm.weight_gradient(true);
    }
    EXPECT_EQ(gradients[0], gradients[1]);
}

TEST(QkNormRotaryCpu, NothingToDo) {
    for (const auto& [batch, tokens, heads] : {std::tuple{0, 5, 2}, {2, 0, 2}, {2, 5, 0}}) {
        QkNormRotaryGradientArgs args;
        args.call.rotary.batch = batch;
        args.call.rotary.tokens = tokens;
        args.call.rotary.q.heads = heads;
        args.call.rotary.head_dim = args.call.rotary.rotary_dim = 8;
        qk_norm_rotary_cpu(args.call);
        qk_norm_rotary_gradient_cpu(args);
    }
}

}  // namespace
}  // namespace mrrope
