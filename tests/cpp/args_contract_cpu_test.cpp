#include <gtest/gtest.h>

#include "cpu_backend.h"
#include "every_contract.h"
#include "reference_backend.h"

namespace mrrope {
namespace {

using namespace mrrope::testing;

TEST(ArgsContractCpu, ListsEveryField) {
    for_each_contract(every_field_matters, [](const auto& contract) { expect_every_field_listed(contract); });
}

TEST(ArgsContractCpu, HeedsEveryField) {
    for_each_contract(every_field_matters, [](const auto& contract) { expect_effects(contract, run_on_cpu); });
}

TEST(ArgsContractCpu, AgreesWithTheReference) {
    for (const DType dtype : {DType::float32, DType::bfloat16}) {
        for_each_contract({.dtype = dtype},
                          [](const auto& contract) { expect_agreement(contract, run_reference, run_on_cpu); });
    }
}

}  // namespace
}  // namespace mrrope
