#include <mrrope/frequency_table.h>
#include <mrrope/qk_norm_rotary.h>
#include <mrrope/rotary.h>
#include <mrrope/rotary_and_cache.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <vector>

// On the CPU, without torch: a rotation, norms with a rotation, and a rotation with a cache write. Each is compared
// with the formula. On a GPU the launchers are called rotary_cuda and so on, and take a stream.
namespace {

constexpr int head_dim = 128;
const std::vector<int64_t> positions{0, 7, 100000};
const auto tokens = static_cast<int64_t>(positions.size());

const mrrope::FrequencyTable table = mrrope::build_table({.method = mrrope::Method::mrrope_pro,
                                                          .rotary_dim = head_dim,
                                                          .base = 5e5,
                                                          .original_max_position = 8192,
                                                          .scale = 16});
const std::vector<uint64_t> packed_table = mrrope::packed(table);

// One head per token.
std::vector<float> example_heads(float phase) {
    std::vector<float> heads(tokens * head_dim);
    for (size_t i = 0; i < heads.size(); ++i) heads[i] = std::sin(phase + static_cast<float>(i));
    return heads;
}

mrrope::RotaryArgs rotation_of(std::vector<float>& heads) {
    mrrope::RotaryArgs args;
    args.q.in = args.q.out = heads.data();
    args.q.heads = 1;
    args.q.in_strides = args.q.out_strides = {.token = head_dim};
    args.positions.data = positions.data();
    args.table = packed_table.data();
    args.batch = 1;
    args.tokens = tokens;
    args.head_dim = args.rotary_dim = head_dim;
    return args;
}

// The largest difference between a token's rotated head and the formula for `head`.
double error(int64_t token, const float* rotated, const float* head) {
    double worst = 0.0;
    for (int i = 0; i < head_dim / 2; ++i) {
        const double angle = static_cast<double>(positions[token]) * table.inv_freq[i];
        const double cos = table.attention_factor * std::cos(angle);
        const double sin = table.attention_factor * std::sin(angle);
        const double a = head[i];
        const double b = head[i + head_dim / 2];
        worst = std::max({worst, std::abs(rotated[i] - (a * cos - b * sin)),
                          std::abs(rotated[i + head_dim / 2] - (b * cos + a * sin))});
    }
    return worst;
}

double error(const std::vector<float>& rotated, const std::vector<float>& heads) {
    double worst = 0.0;
    for (int64_t token = 0; token < tokens; ++token) {
        worst = std::max(worst, error(token, &rotated[token * head_dim], &heads[token * head_dim]));
    }
    return worst;
}

double rotate() {
    std::vector<float> q = example_heads(1.0f);
    const std::vector<float> before = q;
    mrrope::rotary_cpu(rotation_of(q));
    return error(q, before);
}

double norm_and_rotate() {
    std::vector<float> q = example_heads(2.0f);
    const std::vector<float> weight(head_dim, 0.5f);
    std::vector<float> normed = q;
    for (int64_t token = 0; token < tokens; ++token) {
        float* head = &normed[token * head_dim];
        double squares = 0.0;
        for (int i = 0; i < head_dim; ++i) squares += double{head[i]} * head[i];
        const double inverse_rms = 1.0 / std::sqrt(squares / head_dim + 1e-6);
        for (int i = 0; i < head_dim; ++i) head[i] = static_cast<float>(0.5 * inverse_rms * head[i]);
    }
    mrrope::QkNormRotaryArgs args;
    args.rotary = rotation_of(q);
    args.q_weight = weight.data();
    args.eps = 1e-6;
    mrrope::qk_norm_rotary_cpu(args);
    return error(q, normed);
}

// Rotates q in place, and writes rotated k, and v, to two blocks of four slots.
double rotate_and_cache() {
    constexpr int64_t block_size = 4;
    std::vector<float> q = example_heads(3.0f);
    const std::vector<float> q_before = q;
    const std::vector<float> k = example_heads(4.0f);
    const std::vector<float> v = example_heads(5.0f);
    const std::vector<int64_t> slots{6, 0, 3};
    std::vector<float> key_cache(2 * block_size * head_dim);
    std::vector<float> value_cache = key_cache;
    const auto cached = [](const std::vector<float>& heads, std::vector<float>& cache) {
        return mrrope::CachedHeads{.view = {.in = heads.data(),
                                            .out = cache.data(),
                                            .heads = 1,
                                            .in_strides = {.token = head_dim},
                                            .out_strides = {.batch = block_size * head_dim, .token = head_dim}}};
    };
    mrrope::RotaryAndCacheArgs args;
    args.rotary = rotation_of(q);
    args.k = cached(k, key_cache);
    args.v = cached(v, value_cache);
    args.slots = {.of_tokens = {.data = slots.data()}, .blocks = 2, .block_size = block_size};
    mrrope::rotary_and_cache_cpu(args);

    double worst = error(q, q_before);
    for (int64_t token = 0; token < tokens; ++token) {
        worst = std::max(worst, error(token, &key_cache[slots[token] * head_dim], &k[token * head_dim]));
        const bool same =
            std::equal(&v[token * head_dim], &v[token * head_dim] + head_dim, &value_cache[slots[token] * head_dim]);
        if (!same) return HUGE_VAL;
    }
    return worst;
}

// Launchers check their arguments, and name the field.
bool refuses_bad_arguments() {
    std::vector<float> q = example_heads(0.0f);
    mrrope::RotaryArgs args = rotation_of(q);
    args.rotary_dim = 2 * head_dim;
    try {
        mrrope::rotary_cpu(args);
    } catch (const std::invalid_argument& error) {
        std::printf("mrrope::core: %s\n", error.what());
        return true;
    }
    return false;
}

}  // namespace

int main() {
    const double worst = std::max({rotate(), norm_and_rotate(), rotate_and_cache()});
    std::printf("mrrope::core: %s, attention factor %.6f, largest error %.1e\n", mrrope::method_name(table.method),
                table.attention_factor, worst);
    return worst < 1e-6 && refuses_bad_arguments() ? 0 : 1;
}
