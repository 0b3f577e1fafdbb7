#pragma once

#include <stdexcept>
#include <type_traits>
#include <variant>

#include "device/dependent_launch.cuh"
#include "device/norm_row.cuh"
#include "qk_norm_rotary_plan.h"

namespace mrrope {

// Passed to the kernel by value. The divisors take a thread's number apart without dividing.
template <class Real>
struct QkNormRotaryLaunch {
    QkNormRotaryArgs args;
    NormNumbers<Real> numbers;
    QkNormRotaryPlan plan;
    cutlass::FastDivmod lanes;  // over a head: the team
    cutlass::FastDivmod groups;
    cutlass::FastDivmod tokens;
    int q_rows;  // over all heads, or where nothing is held: those of q, of `groups` rows a token
    int threads;
};

// A thread's place: which lane of which group of heads of which token it is.
struct NormPlace {
    int lane;
    int group;
    int groups;  // of q or of k
    int batch;
    int token;
    bool is_q;
    bool works;  // others only lend a hand in sums

    template <NormOver over, class Real>
    __device__ static NormPlace find(const QkNormRotaryLaunch<Real>& launch) {
        NormPlace place;
        const QkNormRotaryPlan& plan = launch.plan;
        int item, member, sequence_token;
        if constexpr (over == NormOver::head) {
            const int thread = blockIdx.x * norm_block_threads + threadIdx.x;
            launch.lanes(item, member, min(thread, launch.threads - 1));
            launch.groups(sequence_token, place.group, item);
            place.is_q = place.group < plan.q_groups;
            if (!place.is_q) place.group -= plan.q_groups;
            place.works = thread < launch.threads && member < plan.lanes;
        } else {
            int row;
            launch.lanes(place.group, member, threadIdx.x);
            launch.groups(sequence_token, row, blockIdx.x);
            place.is_q = row < launch.q_rows;
            place.works = place.group < (place.is_q ? plan.q_groups : plan.k_groups);
            if (!place.works) place.group = 0;
        }
        place.groups = place.is_q ? plan.q_groups : plan.k_groups;
        place.lane = min(member, plan.lanes - 1);
        launch.tokens(place.batch, place.token, sequence_token);
        return place;
    }
};

// A thread holds two vectors of HeadsPerThread heads, all of q or all of k: 16 bytes a load, all of them in flight
// while it computes the Vector phases that those heads share; of eight heads four at a time, the next in flight while
// the last are rotated. The sums of squares are the team's or the block's.
template <class Element, int HeadsPerThread, Pairing pairing, NormOver over, bool looks_up>
__global__ void __launch_bounds__(over == NormOver::head ? norm_block_threads : norm_most_block_threads,
                                  norm_resident_blocks(over, HeadsPerThread, looks_up))
    qk_norm_rotary_kernel(const __grid_constant__ QkNormRotaryLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    constexpr int Vector = 16 / sizeof(Element);
    using Lane = NormLane<pairing, Vector>;
    using Fragment = HeadFragment<Element, Vector>;
    using Wide = WideFragment<Real, Vector>;
    constexpr bool over_head = over == NormOver::head;
    const RotaryArgs& args = launch.args.rotary;
    const auto place = NormPlace::find<over>(launch);
    const Lane lane(place.lane, args.rotary_dim / 2);
    const NormView<Element> view(launch.args, place.is_q);
    const Element* in = view.in + offset_of(view.in_strides, place.batch, place.token, place.group);
    const int64_t in_step = place.groups * view.in_strides.head;
    const auto holds = [&](int j) { return place.works && place.group + j * place.groups < view.heads; };
    // As in rotary_kernel: a call of few threads lasts little longer than the way to memory and back.
    if constexpr (HeadsPerThread <= 2) {
        const bool never = launch.threads < 0;
        compute_before_wait(never, in + lane.first());
        compute_before_wait(never, in + lane.second());
        compute_before_wait(never, address_of_position(args.positions, 0, place.batch, place.token));
        compute_before_wait(never, args.table + lane.pair(0));
    }
    wait_for_previous_kernel();

    constexpr int held = norm_heads_held(HeadsPerThread);
    // Over all heads every head has weights of its own: those of more than two would take too many registers while the
    // sum is waited for.
    constexpr int weights_held = over_head ? 1 : 2;
    // Over all heads, for many tokens, threads compute turns for each other, when their heads have been asked for.
    // Turns first, and fragments that start as zeros, as in the other kernels, made this one take a tenth longer on an
    // H200.
    constexpr bool shares_turns = !over_head && HeadsPerThread == 4;
    Fragment fragments[held];
    Fragment weights[weights_held];
    const auto load_head = [&](int j) {
        if constexpr (!shares_turns) fragments[j % held] = Fragment{};
        if (holds(j)) fragments[j % held].load(in + j * in_step, lane);
    };
    const auto load_weights = [&](int j) {
        if constexpr (!shares_turns) weights[j % weights_held] = Fragment{};
        const int64_t head = over_head ? 0 : place.group + j * place.groups;
        if (holds(j)) weights[j % weights_held].load(view.weight + head * args.head_dim, lane);
    };
    const auto load_first = [&] {
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) load_head(j);
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < weights_held; ++j) load_weights(j);
    };

    const Real direction = args.conjugate ? Real(-1) : Real(1);
    CosSin<Real> by[Vector];
    __shared__ std::conditional_t<shares_turns, SharedTurns<Real, Vector>, std::monostate> shared_turns;
    if constexpr (shares_turns) {
        load_first();
        shared_turns.template compute<pairing, looks_up>(args, place.batch, place.token, direction);
    } else {
        // Asked for first, as in rotary_kernel, since loads are answered in their order.
        LaneTurns<Vector, looks_up> turns;
        turns.ask(args, lane, place.batch, place.token);
        load_first();
        turns.compute(by, args, lane, place.batch, place.token, direction);
    }
    let_next_kernel_start();
    // Worth its registers where many heads follow.
    constexpr bool weighs_turns = over_head && HeadsPerThread == 8;
    WeightedTurn<Real> weighted[weighs_turns ? Vector : 1];
    if constexpr (weighs_turns) {
        with_offset(weights[0], launch.numbers.weight_offset)
            .template for_each_pair<Lane::crosses_vectors>(
                [&](int i, Real a, Real b) { weighted[i] = WeightedTurn<Real>(a, b, by[i]); });
    }

    Element* out = view.out + offset_of(view.out_strides, place.batch, place.token, place.group);
    const int64_t out_step = place.groups * view.out_strides.head;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < HeadsPerThread; first += held) {
        Real sums[held];
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < held; ++j) {
            const Wide wide = fragments[j].widened();
            sums[j] = !shares_turns || holds(first + j) ? sum_of_products(wide, wide) : Real(0);
        }
        if constexpr (over_head) {
            sum_over_team(sums, launch.plan.team);
        } else {
            Real all[1] = {0};
            CUTLASS_PRAGMA_UNROLL
            for (int j = 0; j < held; ++j) all[0] += sums[j];
            sum_over_block(all);
            const Real scale = launch.numbers.inverse_rms(all[0], place.is_q);
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < Vector; ++i) {
                if constexpr (shares_turns) by[i] = lane.turns() ? shared_turns[lane.pair(i)] : CosSin<Real>{1, 0};
                by[i] = {by[i].cos * scale, by[i].sin * scale};
            }
        }

        CUTLASS_PRAGMA_UNROLL
        for (int j = first; j < first + held; ++j) {
            if (!holds(j)) break;
            Wide wide = fragments[j % held].widened();
            const Real offset = launch.numbers.weight_offset;
            if constexpr (weighs_turns) {
                const Real scale = launch.numbers.inverse_rms(sums[j % held], place.is_q);
                wide.template for_each_pair<Lane::crosses_vectors>([&](int i, Real& a, Real& b) {
                    const Pair<Real> turned = weighted[i](a, b);
                    a = scale * turned.first;
                    b = scale * turned.second;
                });
            } else if constexpr (over_head) {
                const Real scale = launch.numbers.inverse_rms(sums[j % held], place.is_q);
                wide.multiply(with_offset(weights[0], offset), scale);
                wide.template rotate<Lane::crosses_vectors>(by);
            } else {
                const Wide weight = with_offset</*asks_first=*/true>(weights[j % weights_held], offset);
                if (j + weights_held < HeadsPerThread) load_weights(j + weights_held);
                wide.multiply(weight);
                wide.template rotate<Lane::crosses_vectors>(by);
            }
            Fragment turned;
            turned.narrow(wide);
            if (j + held < HeadsPerThread) load_head(j + held);
            turned.store(out + j * out_step, lane);
        }
    }
}

// Any shape: a block goes through one row twice, component by component, first for the mean and then to write.
template <class Element, Pairing pairing>
__global__ void __launch_bounds__(norm_row_block_threads, norm_row_resident_blocks)
    qk_norm_rotary_row_kernel(const __grid_constant__ QkNormRotaryLaunch<RealOf<Element>> launch) {
    using Real = RealOf<Element>;
    const RotaryArgs& args = launch.args.rotary;
    const bool over_head = launch.args.over == NormOver::head;
    int sequence_token, row, batch, token;
    launch.groups(sequence_token, row, blockIdx.x);
    launch.tokens(batch, token, sequence_token);
    const NormView<Element> view(launch.args, row < launch.q_rows);
    const int first_head = over_head ? (view.is_q ? row : row - launch.q_rows) : 0;
    const int heads = over_head ? 1 : view.heads;
    const Element* in = view.in + offset_of(view.in_strides, batch, token, first_head);
    Element* out = view.out + offset_of(view.out_strides, batch, token, first_head);
    wait_for_previous_kernel();
    let_next_kernel_start();

    Real sums[1] = {0};
    for (int head = 0; head < heads; ++head) {
        for (int at = threadIdx.x; at < args.head_dim; at += norm_row_block_threads) {
            const auto x = static_cast<Real>(in[head * view.in_strides.head + at]);
            sums[0] += x * x;
        }
    }
    sum_over_block(sums);
    const Real scale = launch.numbers.inverse_rms(sums[0], view.is_q);

    const int half = args.rotary_dim / 2;
    const Real direction = args.conjugate ? Real(-1) : Real(1);
    for (int item = threadIdx.x; item < heads * half; item += norm_row_block_threads) {
        const int head = item / half;
        const NormLane<pairing, 1> lane(item % half, half);
        const Element* weight = view.weight + static_cast<int64_t>(head) * args.head_dim;
        const auto normed = [&](int at) {
            return static_cast<Real>(in[head * view.in_strides.head + at]) * scale *
                   (static_cast<Real>(weight[at]) + launch.numbers.weight_offset);
        };
        LaneTurns<1, true> turns;
        turns.ask(args, lane, batch, token);
        CosSin<Real> by[1];
        turns.compute(by, args, lane, batch, token, direction);
        const Pair<Real> turned = rotate<Real>({normed(lane.first()), normed(lane.second())}, by[0]);
        out[head * view.out_strides.head + lane.first()] = static_cast<Element>(turned.first);
        out[head * view.out_strides.head + lane.second()] = static_cast<Element>(turned.second);
    }
    const int rest = args.head_dim - args.rotary_dim;
    for (int item = threadIdx.x; item < heads * rest; item += norm_row_block_threads) {
        const int head = item / rest;
        const int at = args.rotary_dim + item % rest;
        const auto weight = static_cast<Real>(view.weight[static_cast<int64_t>(head) * args.head_dim + at]);
        const Real normed =
            static_cast<Real>(in[head * view.in_strides.head + at]) * scale * (weight + launch.numbers.weight_offset);
        out[head * view.out_strides.head + at] = static_cast<Element>(normed);
    }
}

template <class Element, Pairing pairing, NormOver over>
auto holding_kernel(const QkNormRotaryPlan& plan, bool looks_up) {
    if (looks_up && plan.heads_per_thread == norm_heads_per_thread_with_lookup) {
        return dependent_kernel<qk_norm_rotary_kernel<Element, norm_heads_per_thread_with_lookup, pairing, over, true>>;
    }
    switch (looks_up ? 0 : plan.heads_per_thread) {
        case 1:
            if constexpr (over == NormOver::head)
                return dependent_kernel<qk_norm_rotary_kernel<Element, 1, pairing, over, false>>;
            break;
        case 2: return dependent_kernel<qk_norm_rotary_kernel<Element, 2, pairing, over, false>>;
        case 4: return dependent_kernel<qk_norm_rotary_kernel<Element, 4, pairing, over, false>>;
        case 8:
            if constexpr (over == NormOver::head)
                return dependent_kernel<qk_norm_rotary_kernel<Element, 8, pairing, over, false>>;
            break;
    }
    throw std::logic_error("mrrope: no kernel norms that many heads a thread");
}

template <class Element, Pairing pairing>
auto norm_kernel(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan, bool looks_up) {
    if constexpr (sizeof(Element) <= 4) {
        if (plan.holds && args.over == NormOver::head) {
            return holding_kernel<Element, pairing, NormOver::head>(plan, looks_up);
        }
        if (plan.holds) return holding_kernel<Element, pairing, NormOver::all_heads>(plan, looks_up);
    }
    return dependent_kernel<qk_norm_rotary_row_kernel<Element, pairing>>;
}

// Instantiated in a file per element type, so that they compile side by side.
template <class Element>
void launch_qk_norm_rotary(const QkNormRotaryArgs& args, const QkNormRotaryPlan& plan, bool looks_up,
                           cudaStream_t stream) {
    const bool holds_heads = plan.holds && args.over == NormOver::head;
    const int64_t tokens = args.rotary.batch * args.rotary.tokens;
    const auto blocks = static_cast<int>(blocks_of(plan, args.over, tokens));
    const int rows = static_cast<int>(blocks_of(plan, args.over, 1));
    const QkNormRotaryLaunch<RealOf<Element>> launch{
        .args = args,
        .numbers = NormNumbers<RealOf<Element>>(args),
        .plan = plan,
        .lanes = cutlass::FastDivmod(holds_heads ? plan.team : plan.lanes),
        .groups = cutlass::FastDivmod(holds_heads ? plan.groups() : rows),
        .tokens = cutlass::FastDivmod(static_cast<int>(args.rotary.tokens)),
        .q_rows = plan.holds ? (plan.q_groups > 0 ? 1 : 0) : plan.q_groups,
        .threads = holds_heads ? static_cast<int>(tokens * plan.team * plan.groups()) : 0,
    };
    const auto kernel = args.rotary.pairing == Pairing::halves
                            ? norm_kernel<Element, Pairing::halves>(args, plan, looks_up)
                            : norm_kernel<Element, Pairing::interleaved>(args, plan, looks_up);
    launch_overlapping(kernel, dim3(blocks), plan.block_threads, stream, launch);
}

extern template void launch_qk_norm_rotary<double>(const QkNormRotaryArgs&, const QkNormRotaryPlan&, bool,
                                                   cudaStream_t);
extern template void launch_qk_norm_rotary<float>(const QkNormRotaryArgs&, const QkNormRotaryPlan&, bool, cudaStream_t);
extern template void launch_qk_norm_rotary<cutlass::half_t>(const QkNormRotaryArgs&, const QkNormRotaryPlan&, bool,
                                                            cudaStream_t);
extern template void launch_qk_norm_rotary<cutlass::bfloat16_t>(const QkNormRotaryArgs&, const QkNormRotaryPlan&, bool,
                                                                cudaStream_t);

}  // namespace mrrope
