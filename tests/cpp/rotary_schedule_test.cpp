#include "rotary_schedule.h"

#include <gtest/gtest.h>

#include "rotary_plan.h"

namespace mrrope {
namespace {

constexpr TableLookup all_lookups[] = {TableLookup::single, TableLookup::speculative, TableLookup::indexed,
                                       TableLookup::position_rows};

TEST(Schedule, IsPlainWithoutPdl) {
    for (const TableLookup lookup : all_lookups) {
        for (const int heads : {1, 2, 3, 5}) {
            const RotarySchedule schedule = rotary_schedule(lookup, heads, /*pdl=*/false);
            EXPECT_FALSE(schedule.speculates_index);
            EXPECT_FALSE(schedule.orders_verification_last);
            EXPECT_FALSE(schedule.prefetches_positions);
            EXPECT_TRUE(schedule.loads_heads_before_table);
        }
    }
}

TEST(Schedule, TriggersAfterTheWaitInSmallLaunches) {
    using Trigger = RotarySchedule::Trigger;
    for (const TableLookup lookup : all_lookups) {
        EXPECT_EQ(rotary_schedule(lookup, 1, true).trigger, Trigger::after_wait);
        for (const int heads : {2, 3, 5}) {
            EXPECT_EQ(rotary_schedule(lookup, heads, true).trigger,
                      lookup == TableLookup::speculative ? Trigger::after_wait_if_small : Trigger::after_cos_sin);
        }
    }
}

TEST(Schedule, LoadsHeadsWhileAnIndexIsInFlight) {
    for (const TableLookup lookup : all_lookups) {
        EXPECT_EQ(rotary_schedule(lookup, 1, true).loads_heads_before_table, lookup == TableLookup::indexed);
        EXPECT_EQ(rotary_schedule(lookup, 1, true).speculates_index, lookup == TableLookup::speculative);
    }
}

TEST(Schedule, PrefetchesPositionsInLargeLaunches) {
    for (const TableLookup lookup : all_lookups) {
        const bool is_plain = lookup == TableLookup::single || lookup == TableLookup::indexed;
        EXPECT_FALSE(rotary_schedule(lookup, 1, true).prefetches_positions);
        EXPECT_EQ(rotary_schedule(lookup, 2, true).prefetches_positions, is_plain);
        EXPECT_TRUE(rotary_schedule(lookup, 3, true).prefetches_positions);
        EXPECT_FALSE(rotary_schedule(lookup, heads_of_whole_table, true).prefetches_positions) << "one wave";
    }
}

}  // namespace
}  // namespace mrrope
