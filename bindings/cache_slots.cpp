#include "cache_slots.h"

#include <c10/util/Exception.h>

#include "mrrope/float8.h"

namespace mrrope {

CacheSlots cache_slots(NamedTensor slots, bool paged, int64_t blocks, int64_t block_size, NamedTensor heads,
                       const Layout& layout) {
    const int64_t batch = layout.batch_of(heads.tensor);
    const int64_t tokens = heads.tensor.size(layout.token);
    TORCH_CHECK_VALUE(!paged || slots.tensor.numel() == batch * tokens, slots.name, " must be ", batch * tokens,
                      ", one for each token of ", heads.name, " of ", heads.tensor.sizes(), " in layout ", layout.name,
                      ", got ", slots.tensor.sizes());
    const CacheSlots result{
        .of_tokens = positions_view(slots, heads, layout), .paged = paged, .blocks = blocks, .block_size = block_size};
    if (!slots.tensor.is_cpu()) return result;
    const PositionsView& view = result.of_tokens;
    for (int64_t i = 0; i < batch * tokens; ++i) {
        const int64_t index = i / tokens * view.batch_stride + i % tokens * view.token_stride;
        const int64_t slot = view.is_int64 ? static_cast<const int64_t*>(view.data)[index]
                                           : static_cast<const int32_t*>(view.data)[index];
        TORCH_CHECK_INDEX(slot < result.count(), slots.name, " must be below ", result.count(), ", the slots of ",
                          paged ? "the cache" : "a sequence", ", or negative to be left out, got ", slot, " for token ",
                          i % tokens, " of sequence ", i / tokens);
    }
    return result;
}

const float* one_scale(const OptionalTensor& scale) {
    if (!scale) return nullptr;
    TORCH_CHECK_VALUE(scale->numel() == 1, "scale must have one element, got ", scale->sizes());
    check_float8_scales({"scale", *scale});
    return static_cast<const float*>(scale->const_data_ptr());
}

void check_float8_scales(NamedTensor scale) {
    const at::Tensor& x = scale.tensor;
    const int64_t stride = x.numel() == 1 ? 0 : stride_or_zero(x, 0);
    for (int64_t i = 0; x.is_cpu() && i < x.numel(); ++i) {
        const float value = static_cast<const float*>(x.const_data_ptr())[i * stride];
        TORCH_CHECK_VALUE(is_float8_scale(value), scale.name, " must be from 2^-126 to 2^126 in magnitude, got ", value,
                          " at index ", i);
    }
}

}  // namespace mrrope
