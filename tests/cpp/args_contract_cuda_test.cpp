#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu_backend.h"
#include "device_memory.h"
#include "every_contract.h"
#include "on_gpu.h"

// Kept small: compute-sanitizer runs these, too.

namespace mrrope {
namespace {

using namespace mrrope::testing;

void call_on_cuda(const RotaryArgs& args) {
    rotary_cuda(args, nullptr);
}
void call_on_cuda(const RotaryCosSinArgs& args) {
    rotary_cos_sin_cuda(args, nullptr);
}
void call_on_cuda(const LearnableRotaryArgs& args) {
    learnable_rotary_cuda(args, nullptr);
}
void call_on_cuda(const LearnableRotaryGradientArgs& args) {
    const LearnableRotaryArgs& call = args.call;
    const int64_t sums = table_sum_rows_cuda(args) * call.tables * (call.rotary.rotary_dim / 2 + 1);
    if (sums > table_sums) throw std::logic_error("the contract has too little memory for table_sums");
    learnable_rotary_gradient_cuda(args, nullptr);
}
void call_on_cuda(const QkNormRotaryArgs& args) {
    qk_norm_rotary_cuda(args, nullptr);
}
void call_on_cuda(const QkNormRotaryGradientArgs& args) {
    const WeightSumRows rows = weight_sum_rows_cuda(args);
    if (rows.q * args.call.weight_count(true) > weight_sums || rows.k * args.call.weight_count(false) > weight_sums) {
        throw std::logic_error("the contract has too little memory for weight_sums");
    }
    qk_norm_rotary_gradient_cuda(args, nullptr);
}
void call_on_cuda(const RotaryAndCacheArgs& args) {
    rotary_and_cache_cuda(args, nullptr);
}
void call_on_cuda(const QkNormRotaryAndCacheArgs& args) {
    qk_norm_rotary_and_cache_cuda(args, nullptr);
}
void call_on_cuda(const MlaRotaryArgs& args) {
    mla_rotary_cuda(args, nullptr);
}
void call_on_cuda(const MlaRotaryGradientArgs& args) {
    mla_rotary_gradient_cuda(args, nullptr);
}
void call_on_cuda(const MlaRotaryAndCacheArgs& args) {
    mla_rotary_and_cache_cuda(args, nullptr);
}
void call_on_cuda(const RescaleCacheArgs& args) {
    rescale_cache_cuda(args, nullptr);
}

// Runs a call on a copy of its memory, to which every pointer among the arguments is translated.
class OnCuda {
public:
    template <class Args>
    void operator()(Args args, ContractMemory& memory) const {
        const std::span<std::byte> host = memory.bytes();
        check(cudaMemcpy(device_.data(), host.data(), host.size(), cudaMemcpyHostToDevice));
        check(cudaDeviceSynchronize());
        std::vector<void*> layers;
        for_each_leaf(args, [&](const std::string& name, auto& field) {
            using Type = std::remove_reference_t<decltype(field)>;
            if constexpr (std::is_pointer_v<Type>) {
                field = translated(field, host, name);
            } else if constexpr (std::is_same_v<Type, std::span<void* const>>) {
                for (void* const keys : field) layers.push_back(translated(keys, host, name));
                field = layers;
            }
        });
        call_on_cuda(args);
        check(cudaDeviceSynchronize());
        check(cudaMemcpy(host.data(), device_.data(), host.size(), cudaMemcpyDeviceToHost));
    }

private:
    template <class T>
    T* translated(T* pointer, std::span<const std::byte> host, const std::string& name) const {
        if (pointer == nullptr) return nullptr;
        const auto* byte = reinterpret_cast<const std::byte*>(pointer);
        if (byte < host.data() || byte >= host.data() + host.size()) {
            throw std::logic_error(name + " points out of the contract's memory");
        }
        return reinterpret_cast<T*>(device_.data() + (byte - host.data()));
    }

    DeviceMemory device_{ContractMemory::capacity};
};

class ArgsContractCuda : public OnGpu {
protected:
    static void expect_agreement_with_the_cpu(ContractOptions options) {
        if (options.dtype == DType::float64) options.rounds_to_float8 = false;
        const OnCuda on_cuda;
        for_each_contract(options, [&](const auto& contract) { expect_agreement(contract, run_on_cpu, on_cuda); });
    }
};

constexpr DType of_both_widths[] = {DType::float32, DType::bfloat16};

TEST_F(ArgsContractCuda, HeedsEveryField) {
    const OnCuda on_cuda;
    for_each_contract(every_field_matters, [&](const auto& contract) { expect_effects(contract, on_cuda); });
}

// Before they read memory: the call's pointers are those of the host.
TEST_F(ArgsContractCuda, RefusesWhatValidateRefuses) {
    for_each_contract(every_field_matters, [](const auto& contract) {
        auto args = contract.call;
        if constexpr (requires { args.call; }) {
            args.call.rotary.rotary_dim = 3;
        } else if constexpr (requires { args.rotary; }) {
            args.rotary.rotary_dim = 3;
        } else {
            args.rotary_dim = 3;
        }
        EXPECT_THROW(call_on_cuda(args), std::invalid_argument) << contract.name;
    });
}

TEST_F(ArgsContractCuda, AgreesWithTheCpu) {
    for (const DType dtype : all_dtypes) expect_agreement_with_the_cpu({.dtype = dtype});
}

TEST_F(ArgsContractCuda, AgreesWithTheCpuOnUnalignedHeads) {
    for (const DType dtype : of_both_widths) expect_agreement_with_the_cpu({.dtype = dtype, .aligned = false});
}

TEST_F(ArgsContractCuda, AgreesWithTheCpuOnOnePositionPerToken) {
    for (const DType dtype : of_both_widths) expect_agreement_with_the_cpu({.dtype = dtype, .has_rows = false});
}

TEST_F(ArgsContractCuda, AgreesWithTheCpuOnOneTable) {
    for (const DType dtype : of_both_widths) expect_agreement_with_the_cpu({.dtype = dtype, .has_choice = false});
}

TEST_F(ArgsContractCuda, AgreesWithTheCpuOnPlainCalls) {
    for (const DType dtype : of_both_widths) {
        for (const bool rotates_whole_heads : {false, true}) {
            expect_agreement_with_the_cpu({.dtype = dtype,
                                           .has_choice = false,
                                           .has_rows = false,
                                           .rotates_whole_heads = rotates_whole_heads,
                                           .rounds_to_float8 = !rotates_whole_heads});
        }
    }
}

TEST_F(ArgsContractCuda, AgreesWithTheCpuOnNormsOverAllHeads) {
    for (const DType dtype : of_both_widths) {
        for (const bool is_plain : {false, true}) {
            expect_agreement_with_the_cpu({.dtype = dtype,
                                           .has_choice = !is_plain,
                                           .has_rows = !is_plain,
                                           .rotates_whole_heads = is_plain,
                                           .norms_all_heads = true});
        }
    }
}

}  // namespace
}  // namespace mrrope
