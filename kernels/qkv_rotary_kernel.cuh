#pragma once

// Blocks are placed while the kernel before still runs, and wait for it before they read.
#define CUTLASS_ENABLE_GDC_FOR_SM90

// Headers for Hopper alone, in the order that they need: those for everything take longer to read than to compile.
// clang-format off
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/cluster_launch.hpp>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>
// clang-format on

#include <stdexcept>
#include <string>
#include <type_traits>

#include "device/dependent_launch.cuh"
#include "device/rotated_accumulators.cuh"
#include "device/rotating_epilogue.cuh"
#include "qkv_rotary_launch.h"

// The projection as CUTLASS builds it for Hopper: one warp group copies tiles of x and weight with the copy engine, two
// multiply them (wgmma), rotate the accumulators and store them. Blocks stay for all their tiles.

namespace mrrope {

// Rows of the product are tokens, columns components.
template <QkvKernel form, class Element>
struct TokensByComponents {
    using Tile = cute::Shape<cute::Int<form.tile_tokens>, cute::Int<qkv_tile>, cute::_64>;
    using Rotation = RotatingEpilogue<Element, form.pairing>;
    static constexpr int columns = columns_at_a_time(form.pairing);
    using EpilogueTile = cute::Shape<cute::_64, cute::Int<columns>>;
    using EpiloguePolicy = cutlass::epilogue::Sm90TmaWarpSpecialized<
        /*StagesC=*/1, /*StagesD=*/2, /*FragmentSize=*/columns / 2, /*ReuseSmemC=*/false, /*DelayTmaStore=*/true>;
    using Epilogue = typename cutlass::epilogue::collective::detail::Sm90TmaBuilderImpl<
        Tile, EpilogueTile, float, float, void, cutlass::layout::RowMajor, 8, Element, cutlass::layout::RowMajor, 8,
        Rotation, EpiloguePolicy>::CollectiveOp;

    template <class Arguments>
    static void give(Arguments& arguments, const QkvRotaryArgs& args) {
        const auto rows = static_cast<int>(args.rows());
        arguments.problem_shape = {rows, args.outputs(), args.inputs, 1};
        arguments.mainloop.ptr_A = static_cast<const Element*>(args.x);
        cute::get<0>(arguments.mainloop.dA) = args.x_stride;
        arguments.mainloop.ptr_B = static_cast<const Element*>(args.weight);
        cute::get<0>(arguments.mainloop.dB) = args.weight_stride;
        cute::get<0>(arguments.epilogue.dD) = args.outputs();
        arguments.epilogue.thread = ProductRotation<Element>::of(args);
    }
};

// The transpose.
template <QkvKernel form, class Element>
struct ComponentsByTokens {
    using Tile = cute::Shape<cute::Int<qkv_tile>, cute::Int<form.tile_tokens>, cute::_64>;
    using EpilogueTile = cute::Shape<cute::_64, cute::Int<form.tile_tokens / 2>>;
    // All of a tile's results lie in shared memory at once: none waits for another to be stored.
    using EpiloguePolicy = cutlass::epilogue::Sm90TmaWarpSpecialized<
        /*StagesC=*/1, /*StagesD=*/4, /*FragmentSize=*/form.tile_tokens / 4, /*ReuseSmemC=*/false,
        /*DelayTmaStore=*/true>;
    using Store = typename cutlass::epilogue::collective::detail::Sm90TmaBuilderImpl<
        Tile, EpilogueTile, float, float, void, cutlass::layout::ColumnMajor, 8, Element, cutlass::layout::ColumnMajor,
        8, cutlass::epilogue::fusion::Sm90AccFetch, EpiloguePolicy>::CollectiveOp;
    using Epilogue = RotatedAccumulators<Store, Element>;

    template <class Arguments>
    static void give(Arguments& arguments, const QkvRotaryArgs& args) {
        const auto rows = static_cast<int>(args.rows());
        arguments.problem_shape = {args.outputs(), rows, args.inputs, 1};
        arguments.mainloop.ptr_A = static_cast<const Element*>(args.weight);
        cute::get<0>(arguments.mainloop.dA) = args.weight_stride;
        arguments.mainloop.ptr_B = static_cast<const Element*>(args.x);
        cute::get<0>(arguments.mainloop.dB) = args.x_stride;
        cute::get<1>(arguments.epilogue.dD) = args.outputs();
        arguments.epilogue.rotation = ProductRotation<Element>::of(args);
    }
};

template <QkvKernel form, class Element>
struct QkvProjection {
    using Product =
        std::conditional_t<form.transposed, ComponentsByTokens<form, Element>, TokensByComponents<form, Element>>;
    // Two blocks, tiles below each other, share what is beside.
    using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
    using Epilogue = typename Product::Epilogue;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor, 8, Element,
        cutlass::layout::ColumnMajor, 8, float, typename Product::Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
        cutlass::gemm::KernelTmaWarpSpecializedPingpong>::CollectiveOp;
    using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue,
                                                        cutlass::gemm::PersistentScheduler>;

    static typename Kernel::Arguments arguments(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
        typename Kernel::Arguments arguments{};
        arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
        Product::give(arguments, args);
        arguments.epilogue.ptr_D = static_cast<Element*>(args.out);
        arguments.scheduler.max_swizzle_size = plan.swizzle;
        using Order = decltype(arguments.scheduler.raster_order);
        const bool along_tokens = plan.raster == QkvRotaryPlan::Raster::rows;
        arguments.scheduler.raster_order = along_tokens != form.transposed ? Order::AlongM : Order::AlongN;
        arguments.hw_info.sm_count = multiprocessors_of_current_device();
        return arguments;
    }

    static size_t workspace(const QkvRotaryArgs& args, const QkvRotaryPlan& plan) {
        return Kernel::get_workspace_size(arguments(args, plan));
    }

    static void launch(const QkvRotaryArgs& args, const QkvRotaryPlan& plan, void* workspace, cudaStream_t stream) {
        const auto given = arguments(args, plan);
        if (!Kernel::can_implement(given)) fail(cutlass::Status::kErrorInvalidProblem);
        check(Kernel::initialize_workspace(given, workspace, stream));
        typename Kernel::Params params = Kernel::to_underlying_arguments(given, workspace);
        const auto entry = reinterpret_cast<const void*>(cutlass::device_kernel<Kernel>);
        constexpr int shared_bytes = Kernel::SharedStorageSize;
        check_cuda(cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
        void* parameters[] = {&params};
        check(cutlass::ClusterLauncher::launch(Kernel::get_grid_shape(params),
                                               dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{})),
                                               Kernel::get_block_shape(), shared_bytes, stream, entry, parameters,
                                               /*launch_with_pdl=*/true));  // there is no code but sm_90a's
    }

private:
    static void check(cutlass::Status status) {
        if (status != cutlass::Status::kSuccess) fail(status);
    }

    [[noreturn]] static void fail(cutlass::Status status) {
        cudaGetLastError();  // or the next one to ask would take it for an error of its own
        throw std::runtime_error("mrrope: the projection by " + describe(form) +
                                 " could not be launched: " + cutlass::cutlassGetStatusString(status));
    }
};

template <QkvKernel kernel>
QkvLauncher qkv_launcher(DType dtype) {
    using Half = QkvProjection<kernel, cutlass::half_t>;
    using Bfloat = QkvProjection<kernel, cutlass::bfloat16_t>;
    return dtype == DType::float16 ? QkvLauncher{Half::workspace, Half::launch}
                                   : QkvLauncher{Bfloat::workspace, Bfloat::launch};
}

}  // namespace mrrope
