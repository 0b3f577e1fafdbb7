#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "device_memory.h"
#include "elements.h"
#include "mrrope/frequency_table.h"
#include "mrrope/qkv_rotary.h"
#include "on_gpu.h"
#include "qkv_rotary_plan.h"
#include "reference_rotation.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

constexpr std::byte poison{0xff};  // NaN in every element type
constexpr size_t guard_bytes = 4096;

enum class Positions {
    anywhere,     // the largest, 0, and random ones
    consecutive,  // through all sequences, up to the largest
    broken,       // consecutive but for the last but one
    restarting,   // consecutive within each sequence
    around_zero,  // consecutive, starting below 0
};

struct QkvCase {
    DType dtype = DType::bfloat16;
    Pairing pairing = Pairing::halves;
    int64_t batch = 1;
    int64_t tokens = 129;
    int inputs = 136;  // not a multiple of the tile's K
    int q_heads = 3;
    int kv_heads = 1;
    int head_dim = 128;
    int rotary_dim = 128;
    bool with_bias = false;
    bool int32_positions = false;
    Positions positions = Positions::anywhere;

    int64_t rows() const { return batch * tokens; }
    int outputs() const { return (q_heads + 2 * kv_heads) * head_dim; }
};

std::string describe(const QkvCase& c) {
    return std::string(name_of(c.dtype)) + (c.pairing == Pairing::halves ? " halves " : " interleaved ") +
           std::to_string(c.batch) + " x " + std::to_string(c.tokens) + " rows, " + std::to_string(c.inputs) +
           " inputs, heads " + std::to_string(c.q_heads) + "/" + std::to_string(c.kv_heads) + " of " +
           std::to_string(c.head_dim) + ", rotary_dim " + std::to_string(c.rotary_dim) + (c.with_bias ? ", bias" : "") +
           ", positions of kind " + std::to_string(static_cast<int>(c.positions));
}

// One call: its inputs, the expected result, and its tolerance.
class Projection {
public:
    explicit Projection(const QkvCase& options)
        : options_(options),
          x_(random_elements(options.rows() * options.inputs, 1)),
          weight_(random_elements(int64_t{options.outputs()} * options.inputs, 2)),
          bias_(random_elements(options.outputs(), 3)),
          table_(packed(build_table({.method = Method::mrrope_pro,
                                     .rotary_dim = options.rotary_dim,
                                     .base = 5e5,
                                     .original_max_position = 8192,
                                     .scale = 16}))) {
        std::mt19937_64 random(4);
        for (int64_t row = 0; row < options.rows(); ++row) positions_.push_back(position_of(row, random));
        compute_expected();
    }

    // Runs a plan on the GPU; guard bytes around the result must not change.
    void run_and_expect(const QkvRotaryPlan& plan) const {
        SCOPED_TRACE(describe(options_) + ", kernel " + mrrope::describe(qkv_kernels[plan.kernel]) + ", swizzle " +
                     std::to_string(plan.swizzle));
        const DeviceMemory x(x_), weight(weight_), bias(bias_), table(table_);
        const DeviceMemory positions = positions_on_device();
        const size_t out_bytes = static_cast<size_t>(options_.rows()) * options_.outputs() * size_of(options_.dtype);
        std::vector<std::byte> out(out_bytes + 2 * guard_bytes, poison);
        const DeviceMemory device_out(out);

        QkvRotaryArgs args;
        args.x = x.data();
        args.x_stride = args.weight_stride = options_.inputs;
        args.weight = weight.data();
        args.bias = options_.with_bias ? bias.data() : nullptr;
        args.out = device_out.data() + guard_bytes;
        args.positions = {.data = positions.data(),
                          .is_int64 = !options_.int32_positions,
                          .batch_stride = options_.tokens,
                          .token_stride = 1};
        args.table = table.as<uint64_t>();
        args.batch = options_.batch;
        args.tokens = options_.tokens;
        args.inputs = options_.inputs;
        args.q_heads = options_.q_heads;
        args.kv_heads = options_.kv_heads;
        args.head_dim = options_.head_dim;
        args.rotary_dim = options_.rotary_dim;
        args.dtype = options_.dtype;
        args.pairing = options_.pairing;
        const std::vector<std::byte> noise(qkv_rotary_workspace_cuda(args, plan), poison);
        const DeviceMemory workspace(noise);
        const Stream stream;
        qkv_rotary_cuda(args, plan, workspace.data(), stream);
        check(cudaDeviceSynchronize());
        device_out.download(out);

        for (size_t i = 0; i < guard_bytes; ++i) {
            ASSERT_EQ(out[i], poison) << "before the result";
            ASSERT_EQ(out[guard_bytes + out_bytes + i], poison) << "after the result";
        }
        const double half_ulp = std::ldexp(1.0, -format_of(options_.dtype).significant_bits);
        for (int64_t i = 0; i < options_.rows() * options_.outputs(); ++i) {
            const double actual = element_at(options_.dtype, out.data() + guard_bytes + i * size_of(options_.dtype));
            const double slack = std::abs(expected_[i]) * half_ulp + arithmetic_slack_[i];
            ASSERT_LE(std::abs(actual - expected_[i]), slack)
                << actual << " instead of " << expected_[i] << ", row " << i / options_.outputs() << " column "
                << i % options_.outputs();
            ASSERT_FALSE(std::isnan(actual));
        }
    }

    const QkvCase& options() const { return options_; }

private:
    int64_t position_of(int64_t row, std::mt19937_64& random) const {
        constexpr int64_t last = (int64_t{1} << 31) - 1;
        const int64_t rows = options_.rows();
        switch (options_.positions) {
            case Positions::consecutive: return last - rows + 1 + row;
            case Positions::broken: return row == rows - 2 ? 3 : last - rows + 1 + row;
            case Positions::restarting: return row % options_.tokens;
            case Positions::around_zero: return row - rows / 2;
            case Positions::anywhere: break;
        }
        return row % 3 == 0 ? last - row : row % 3 == 1 ? row : static_cast<int64_t>(random() & last);
    }

    std::vector<std::byte> random_elements(int64_t count, uint64_t seed) const {
        std::vector<std::byte> elements(count * size_of(options_.dtype));
        std::mt19937_64 random(seed);
        for (int64_t i = 0; i < count; ++i) {
            write_random_element(options_.dtype, elements.data() + i * size_of(options_.dtype), random);
        }
        return elements;
    }

    std::vector<double> values(const std::vector<std::byte>& elements) const {
        std::vector<double> values(elements.size() / size_of(options_.dtype));
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = element_at(options_.dtype, elements.data() + i * size_of(options_.dtype));
        }
        return values;
    }

    DeviceMemory positions_on_device() const {
        if (!options_.int32_positions) return DeviceMemory(positions_);
        return DeviceMemory(std::vector<int32_t>(positions_.begin(), positions_.end()));
    }

    void compute_expected() {
        const std::vector<double> x = values(x_), weight = values(weight_), bias = values(bias_);
        const int outputs = options_.outputs();
        const int inputs = options_.inputs;
        expected_.resize(options_.rows() * outputs);
        arithmetic_slack_.resize(expected_.size());
        std::vector<double> sizes(outputs);
        for (int64_t row = 0; row < options_.rows(); ++row) {
            double* projected = expected_.data() + row * outputs;
            for (int column = 0; column < outputs; ++column) {
                double sum = options_.with_bias ? bias[column] : 0.0;
                double size = std::abs(sum);
                for (int i = 0; i < inputs; ++i) {
                    const double product = x[row * inputs + i] * weight[int64_t{column} * inputs + i];
                    sum += product;
                    size += std::abs(product);
                }
                projected[column] = sum;
                sizes[column] = size;
            }
            rotate_row(row, projected, sizes);
            // Tensor cores align the products of a sum and truncate them to float32.
            for (int column = 0; column < outputs; ++column) {
                arithmetic_slack_[row * outputs + column] = sizes[column] * (inputs + 16) * 0x1p-23;
            }
        }
    }

    void rotate_row(int64_t row, double* projected, std::vector<double>& sizes) const {
        const int half = options_.rotary_dim / 2;
        const auto gain = std::abs(std::bit_cast<double>(table_[half]));
        for (int head = 0; head < options_.q_heads + options_.kv_heads; ++head) {
            for (int pair = 0; pair < half; ++pair) {
                const auto [cos, sin] = reference_cos_sin(reference_angle(positions_[row], table_[pair]), gain);
                const bool halves = options_.pairing == Pairing::halves;
                const int start = head * options_.head_dim;
                const int first = start + (halves ? pair : 2 * pair);
                const int second = start + (halves ? pair + half : 2 * pair + 1);
                const long double a = projected[first];
                const long double b = projected[second];
                projected[first] = static_cast<double>(a * cos - b * sin);
                projected[second] = static_cast<double>(b * cos + a * sin);
                sizes[first] = sizes[second] = gain * (sizes[first] + sizes[second]);
            }
        }
    }

    QkvCase options_;
    std::vector<std::byte> x_, weight_, bias_;
    std::vector<uint64_t> table_;
    std::vector<int64_t> positions_;
    std::vector<double> expected_, arithmetic_slack_;
};

class QkvRotaryCuda : public OnGpu {
protected:
    void SetUp() override {
        OnGpu::SetUp();
        if (IsSkipped()) return;
        int major = 0;
        check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
        if (major != 9) GTEST_SKIP() << "the kernels are for sm_90a, this is sm_" << major << "x";
    }

    static bool supports(int kernel, const QkvCase& options) {
        return mrrope::supports(qkv_kernels[kernel], {.rotary_dim = options.rotary_dim, .pairing = options.pairing});
    }

    static void run_every_kernel(const QkvCase& options) {
        const Projection projection(options);
        for (int kernel = 0; kernel < qkv_kernel_count; ++kernel) {
            if (supports(kernel, options)) projection.run_and_expect({.kernel = kernel});
            if (HasFatalFailure()) return;
        }
    }
};

TEST_F(QkvRotaryCuda, AnyNumberOfRows) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
        for (const Pairing pairing : both_pairings) {
            for (const int64_t tokens : {1, 7, 64, 129, 300}) {
                run_every_kernel({.dtype = dtype, .pairing = pairing, .tokens = tokens});
                if (HasFailure()) return;
            }
        }
    }
}

TEST_F(QkvRotaryCuda, BiasAndSeveralSequences) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
        for (const Pairing pairing : both_pairings) {
            for (const bool int32_positions : {false, true}) {
                run_every_kernel({.dtype = dtype,
                                  .pairing = pairing,
                                  .batch = 3,
                                  .tokens = 67,
                                  .with_bias = true,
                                  .int32_positions = int32_positions});
                if (HasFailure()) return;
            }
        }
    }
}

TEST_F(QkvRotaryCuda, ConsecutivePositions) {
    for (const DType dtype : {DType::bfloat16, DType::float16}) {
        for (const Positions positions :
             {Positions::consecutive, Positions::broken, Positions::restarting, Positions::around_zero}) {
            for (const int64_t tokens : {1, 33, 160, 333}) {
                for (const int64_t batch : {1, 2}) {
                    run_every_kernel({.dtype = dtype,
                                      .batch = batch,
                                      .tokens = tokens,
                                      .with_bias = true,
                                      .int32_positions = batch == 2,
                                      .positions = positions});
                    if (HasFailure()) return;
                }
            }
        }
    }
}

TEST_F(QkvRotaryCuda, HeadsOfEverySize) {
    struct Heads {
        Pairing pairing;
        int head_dim;
        int rotary_dim;
    };
    for (const auto& [pairing, head_dim, rotary_dim] :
         {Heads{Pairing::halves, 64, 64}, Heads{Pairing::halves, 128, 64}, Heads{Pairing::halves, 256, 128},
          Heads{Pairing::halves, 256, 64}, Heads{Pairing::interleaved, 32, 32}, Heads{Pairing::interleaved, 64, 32},
          Heads{Pairing::interleaved, 96, 96}, Heads{Pairing::interleaved, 128, 96},
          Heads{Pairing::interleaved, 160, 64}, Heads{Pairing::interleaved, 256, 256}}) {
        run_every_kernel({.pairing = pairing,
                          .tokens = 70,
                          .q_heads = 5,
                          .kv_heads = 2,
                          .head_dim = head_dim,
                          .rotary_dim = rotary_dim,
                          .with_bias = true});
        if (HasFailure()) return;
    }
}

TEST_F(QkvRotaryCuda, EveryRasterOrderAndSwizzle) {
    for (const Pairing pairing : both_pairings) {
        const Projection projection({.pairing = pairing, .tokens = 1000, .inputs = 256, .q_heads = 4});
        for (int kernel = 0; kernel < qkv_kernel_count; ++kernel) {
            if (!supports(kernel, projection.options())) continue;
            for (const int swizzle : {1, 2, 4, 8}) {
                for (const auto raster : {QkvRotaryPlan::Raster::rows, QkvRotaryPlan::Raster::columns}) {
                    projection.run_and_expect({.kernel = kernel, .swizzle = swizzle, .raster = raster});
                    if (HasFailure()) return;
                }
            }
        }
    }
}

TEST_F(QkvRotaryCuda, KernelsRejectUnsupportedShapes) {
    QkvRotaryArgs args;
    args.x_stride = args.weight_stride = args.inputs = 128;
    args.batch = 1;
    args.tokens = 8;
    args.q_heads = args.kv_heads = 1;
    args.head_dim = args.rotary_dim = 128;
    const int interleaved =
        static_cast<int>(std::find_if(std::begin(qkv_kernels), std::end(qkv_kernels),
                                      [](const QkvKernel& kernel) { return kernel.pairing == Pairing::interleaved; }) -
                         std::begin(qkv_kernels));
    EXPECT_THROW(qkv_rotary_cuda(args, {.kernel = interleaved}, nullptr, nullptr), std::invalid_argument);
    EXPECT_THROW(qkv_rotary_cuda(args, {.kernel = qkv_kernel_count}, nullptr, nullptr), std::invalid_argument);
    EXPECT_THROW(qkv_rotary_cuda(args, {}, nullptr, nullptr), std::invalid_argument);
    args.rotary_dim = 64;
    for (int kernel = 0; kernel < qkv_kernel_count; ++kernel) {
        if (!qkv_kernels[kernel].transposed) continue;
        EXPECT_THROW(qkv_rotary_cuda(args, {.kernel = kernel}, nullptr, nullptr), std::invalid_argument);
    }
    args.dtype = DType::float32;
    EXPECT_THROW(qkv_rotary_cuda(args, {.kernel = 0}, nullptr, nullptr), std::invalid_argument);
}

}  // namespace
}  // namespace mrrope
