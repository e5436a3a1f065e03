/* Converts values of enum ibv_rate for ibv_rate_to_mult(3) and ibv_rate_to_mbps(3). */
#include "softdev.h"

/* Static rates (IBTA table 75). Up to QDR, a lane's signalling rate is a multiple of 2.5 Gb/s. FDR
 * and faster links use 64b/66b coding and are named by their data rate. A `mult` of 0 means that
 * the rate has no multiplier. */
static const struct rate {
	enum ibv_rate rate;
	int mult;
	int mbps;
} rates[] = {
	{IBV_RATE_2_5_GBPS, 1, 2500},       {IBV_RATE_5_GBPS, 2, 5000},
	{IBV_RATE_10_GBPS, 4, 10000},       {IBV_RATE_20_GBPS, 8, 20000},
	{IBV_RATE_30_GBPS, 12, 30000},      {IBV_RATE_40_GBPS, 16, 40000},
	{IBV_RATE_60_GBPS, 24, 60000},      {IBV_RATE_80_GBPS, 32, 80000},
	{IBV_RATE_120_GBPS, 48, 120000},    {IBV_RATE_14_GBPS, 0, 14062},
	{IBV_RATE_56_GBPS, 0, 56250},       {IBV_RATE_112_GBPS, 0, 112500},
	{IBV_RATE_168_GBPS, 0, 168750},     {IBV_RATE_25_GBPS, 0, 25781},
	{IBV_RATE_100_GBPS, 0, 103125},     {IBV_RATE_200_GBPS, 0, 206250},
	{IBV_RATE_300_GBPS, 0, 309375},     {IBV_RATE_28_GBPS, 11, 28125},
	{IBV_RATE_50_GBPS, 20, 53125},      {IBV_RATE_400_GBPS, 160, 425000},
	{IBV_RATE_600_GBPS, 240, 637500},   {IBV_RATE_800_GBPS, 320, 850000},
	{IBV_RATE_1200_GBPS, 480, 1275000},
};

/* Return `found` from the enclosing function for the first rate `it` that meets `condition`. Return
 * `otherwise` if no rate does. */
#define FIND(condition, found, otherwise)                                                          \
	for (const struct rate *it = rates; it < rates + sizeof(rates) / sizeof(*rates); it++)     \
		if (condition)                                                                     \
			return found;                                                              \
	return otherwise

int soft_ibv_rate_to_mult(enum ibv_rate rate)
{
	FIND(it->rate == rate && it->mult, it->mult, -1);
}

enum ibv_rate soft_mult_to_ibv_rate(int mult)
{
	FIND(mult && it->mult == mult, it->rate, IBV_RATE_MAX);
}

int soft_ibv_rate_to_mbps(enum ibv_rate rate)
{
	FIND(it->rate == rate, it->mbps, -1);
}

enum ibv_rate soft_mbps_to_ibv_rate(int mbps)
{
	FIND(it->mbps == mbps, it->rate, IBV_RATE_MAX);
}
