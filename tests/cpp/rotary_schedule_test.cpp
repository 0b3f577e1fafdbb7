#include "rotary_schedule.h"

#include <gtest/gtest.h>

namespace mrrope {
namespace {

constexpr TableLookup all_lookups[] = {TableLookup::single, TableLookup::indexed, TableLookup::position_rows};

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
                      lookup == TableLookup::indexed ? Trigger::after_wait_if_small : Trigger::after_cos_sin);
        }
    }
}

TEST(Schedule, SpeculatesOnTheIndexOnly) {
    for (const TableLookup lookup : all_lookups) {
        const RotarySchedule schedule = rotary_schedule(lookup, 1, true);
        EXPECT_FALSE(schedule.loads_heads_before_table);
        EXPECT_EQ(schedule.speculates_index, lookup == TableLookup::indexed);
        EXPECT_EQ(schedule.orders_verification_last, lookup == TableLookup::indexed);
    }
}

TEST(Schedule, LoadsHeadsWhileAnIndexIsInFlight) {
    for (const TableLookup lookup : all_lookups) {
        const RotarySchedule schedule = rotary_schedule(lookup, 1, /*pdl=*/true, /*may_speculate=*/false);
        EXPECT_FALSE(schedule.speculates_index);
        EXPECT_EQ(schedule.loads_heads_before_table, lookup == TableLookup::indexed);
    }
}

TEST(Schedule, PrefetchesPositionsInLargeLaunches) {
    for (const TableLookup lookup : all_lookups) {
        EXPECT_FALSE(rotary_schedule(lookup, 1, true).prefetches_positions);
        EXPECT_EQ(rotary_schedule(lookup, 2, true).prefetches_positions, lookup == TableLookup::single);
        EXPECT_TRUE(rotary_schedule(lookup, 3, true).prefetches_positions);
        EXPECT_FALSE(rotary_schedule(lookup, 5, true).prefetches_positions) << "one wave: no block starts later";
    }
}

}  // namespace
}  // namespace mrrope
