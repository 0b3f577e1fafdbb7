#pragma once

#include <cstdint>

#include "device_memory.h"
#include "mrrope/rotary.h"
#include "rotary_case.h"

namespace mrrope::testing {

// A case on the device: its buffers, with the noise around the heads, copied there and back.
class DeviceCase {
public:
    explicit DeviceCase(RotaryCase& rotary)
        : rotary_(rotary),
          q_in_(rotary.q().in.bytes),
          q_out_(rotary.q().out.bytes),
          k_in_(rotary.k().in.bytes),
          k_out_(rotary.k().out.bytes),
          positions_(rotary.positions().words()),
          tables_(rotary.tables().words()),
          indices_(rotary.indices().words()) {}

    RotaryArgs args() {
        RotaryArgs args = rotary_.args();
        move_to_device(args.q, rotary_.q(), q_in_, q_out_);
        move_to_device(args.k, rotary_.k(), k_in_, k_out_);
        args.positions.data = positions_.data();
        args.table = tables_.as<uint64_t>();
        if (args.positions.row_of_pair != nullptr) {
            args.positions.row_of_pair = args.table + rotary_.tables().first_row_word();
        }
        if (args.choice.index != nullptr) args.choice.index = indices_.as<int32_t>();
        if (args.choice.query_factors != nullptr) {
            args.choice.query_factors = args.table + rotary_.tables().first_factor_word();
        }
        return args;
    }

    void fetch() {
        check(cudaDeviceSynchronize());
        q_in_.download(rotary_.q().in.bytes);
        q_out_.download(rotary_.q().out.bytes);
        k_in_.download(rotary_.k().in.bytes);
        k_out_.download(rotary_.k().out.bytes);
    }

private:
    void move_to_device(HeadsView& view, const Heads& heads, const DeviceMemory& in, const DeviceMemory& out) {
        if (view.heads == 0) return;
        const bool in_place = rotary_.options().in_place;
        view.in = in.data() + heads.in.first_byte;
        view.out = in_place ? in.data() + heads.in.first_byte : out.data() + heads.out.first_byte;
    }

    RotaryCase& rotary_;
    DeviceMemory q_in_, q_out_, k_in_, k_out_, positions_, tables_, indices_;
};

}  // namespace mrrope::testing
