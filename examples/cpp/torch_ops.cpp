#include <ATen/ATen.h>
#include <mrrope/torch_ops.h>

#include <cstdio>

// The registered torch ops on the CPU, compared with the formula: rotary forward, backward and in place, norms with a
// rotation, and a rotation with a cache write.
namespace {

at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const auto halves = x.chunk(2, -1);
    return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

double difference(const at::Tensor& a, const at::Tensor& b) {
    return (a - b).abs().max().item<double>();
}

}  // namespace

int main() {
    const mrrope::FrequencyTable t = mrrope::build_table({.method = mrrope::Method::mrrope_pro,
                                                          .rotary_dim = 64,
                                                          .base = 5e5,
                                                          .original_max_position = 8192,
                                                          .scale = 16});
    const at::Tensor table = mrrope::packed_tensor(t, at::kCPU);
    const at::Tensor positions = at::arange(100, 109, at::kLong);
    const at::Tensor q = at::randn({2, 4, 9, 64}, at::kDouble).requires_grad_();
    const at::Tensor k = at::randn({2, 2, 9, 64}, at::kDouble).requires_grad_();
    const std::vector<at::Tensor> result = mrrope::rotary({q, k}, positions, table);

    const at::Tensor frequencies = at::tensor(t.inv_freq, at::kDouble);
    const at::Tensor angles = positions.to(at::kDouble).unsqueeze(1) * frequencies;
    const at::Tensor cos = angles.cos() * t.attention_factor;
    const at::Tensor sin = angles.sin() * t.attention_factor;
    double worst = difference(result[0], rotated(q, cos, sin));
    worst = std::max(worst, difference(result[1], rotated(k, cos, sin)));

    const at::Tensor weights = at::randn_like(result[0]);
    (result[0] * weights).sum().backward();
    worst = std::max(worst, difference(q.grad(), rotated(weights, cos, -sin)));
    const bool k_has_gradient = k.grad().defined() && k.grad().abs().max().item<double>() != 0.0;

    const at::Tensor in_place = q.detach().clone();
    mrrope::rotary_({in_place}, positions, table);
    worst = std::max(worst, difference(in_place, result[0]));

    const at::Tensor weight = at::rand({64}, at::kDouble) + 0.5;
    const at::Tensor inverse_rms = (q.detach().square().mean(-1, /*keepdim=*/true) + 1e-6).rsqrt();
    const at::Tensor normed = q.detach() * inverse_rms * weight;
    const at::Tensor both = mrrope::qk_norm_rotary({q.detach()}, {weight}, positions, table, /*eps=*/1e-6)[0];
    worst = std::max(worst, difference(both, rotated(normed, cos, sin)));

    // [batch, tokens, heads, head_dim], as a projection returns them; slots count through the blocks of the cache.
    const auto by_token = [](const at::Tensor& heads) { return heads.detach().transpose(1, 2).contiguous(); };
    const at::Tensor values = at::randn_like(k.detach());
    const at::Tensor key_cache = at::zeros({6, 4, 2, 64}, at::kDouble);
    const at::Tensor value_cache = at::zeros_like(key_cache);
    const at::Tensor slots = at::randperm(6 * 4, at::kLong).slice(0, 0, 2 * 9).view({2, 9});
    mrrope::rotary_and_cache_(by_token(q), by_token(k), by_token(values), positions, table, key_cache, value_cache,
                              slots, /*paged=*/true, {.layout = mrrope::HeadsLayout::bshd});
    const at::Tensor keys = key_cache.flatten(0, 1).index_select(0, slots.flatten());
    worst = std::max(worst, difference(keys, by_token(rotated(k.detach(), cos, sin)).flatten(0, 1)));
    const at::Tensor cached_values = value_cache.flatten(0, 1).index_select(0, slots.flatten());
    worst = std::max(worst, difference(cached_values, by_token(values).flatten(0, 1)));

    std::printf("mrrope::torch: rotation, norms and cache write, largest error %.1e\n", worst);
    return worst < 1e-12 && !k_has_gradient ? 0 : 1;
}
