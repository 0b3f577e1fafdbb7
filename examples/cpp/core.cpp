#include <mrrope/frequency_table.h>
#include <mrrope/rotary.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

// Rotate three vectors of ones at positions 0, 7 and 100000 on the CPU, without torch.
int main() {
    mrrope::FrequencyTable t = mrrope::build_table({.method = mrrope::Method::mrrope_pro,
                                                    .rotary_dim = 128,
                                                    .base = 5e5,
                                                    .original_max_position = 8192,
                                                    .scale = 16});
    const std::vector<uint64_t> table = mrrope::packed(t);
    const std::vector<int64_t> positions{0, 7, 100000};
    std::vector<float> heads(positions.size() * 128, 1.0f);

    mrrope::RotaryArgs args;
    args.q.in = args.q.out = heads.data();
    args.q.heads = 1;
    args.q.in_strides = args.q.out_strides = {.token = 128};
    args.positions.data = positions.data();
    args.table = table.data();
    args.batch = 1;
    args.tokens = static_cast<int64_t>(positions.size());
    args.head_dim = args.rotary_dim = 128;
    mrrope::rotary_cpu(args);

    double worst = 0.0;
    for (size_t token = 0; token < positions.size(); ++token) {
        for (int i = 0; i < 64; ++i) {
            const double angle = static_cast<double>(positions[token]) * t.inv_freq[i];
            const double first = t.attention_factor * (std::cos(angle) - std::sin(angle));
            const double second = t.attention_factor * (std::cos(angle) + std::sin(angle));
            worst = std::fmax(worst, std::abs(heads[token * 128 + i] - first));
            worst = std::fmax(worst, std::abs(heads[token * 128 + 64 + i] - second));
        }
    }
    std::printf("mrrope::core: %s, attention factor %.6f, largest error %.1e\n", mrrope::method_name(t.method),
                t.attention_factor, worst);
    return worst < 1e-6 ? 0 : 1;
}
