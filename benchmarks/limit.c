/* The least that a lookup can take: every row read once, asked for ahead, sums kept in registers and streamed out.
 *
 * One table, whose rows `ids` names; bags of `bag_size` ids each; dims that are a multiple of 8, up to 256. It checks
 * nothing, knows no offsets, weights or 16 bits, and each size of bag and row has a loop of its own. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { MAX_THREADS = 64, HUGE_PAGE = 2 << 20 };

struct share {
    const float *table;
    const long *ids;
    float *out;
    long dim, bag_size, ahead, begin, end;  // bags
    int streamed;
};

/* Zeroed memory in huge pages where there are some; never given back. */
float *new_floats(long count) {
    size_t bytes = count * sizeof(float) + HUGE_PAGE;
    char *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) return NULL;
    madvise(map, bytes, MADV_HUGEPAGE);
    return (float *)(((size_t)map + HUGE_PAGE - 1) & ~(size_t)(HUGE_PAGE - 1));
}

static inline __attribute__((always_inline)) void sum_columns(const struct share *s, const long *ids, float *to,
                                                              long column, int vectors) {
    __m256 sums[8];
    for (int v = 0; v < vectors; v++) sums[v] = _mm256_setzero_ps();
    for (long i = 0; i < s->bag_size; i++) {
        const float *row = s->table + ids[i] * s->dim + column;
        for (int v = 0; v < vectors; v++) sums[v] = _mm256_add_ps(sums[v], _mm256_loadu_ps(row + v * 8));
    }
    for (int v = 0; v < vectors; v++) {
        if (s->streamed) _mm256_stream_ps(to + column + v * 8, sums[v]);
        else _mm256_storeu_ps(to + column + v * 8, sums[v]);
    }
}

static void *pool(void *argument) {
    const struct share *s = argument;
    const long *end = s->ids + s->end * s->bag_size;
    for (long bag = s->begin; bag < s->end; bag++) {
        const long *ids = s->ids + bag * s->bag_size;
        for (long i = s->ahead; i < s->ahead + s->bag_size && ids + i < end; i++)
            for (long j = 0; j < s->dim; j += 16) _mm_prefetch((char *)(s->table + ids[i] * s->dim + j), _MM_HINT_T0);
        float *to = s->out + bag * s->dim;
        long column = 0;
        for (; column + 64 <= s->dim; column += 64) sum_columns(s, ids, to, column, 8);
        for (; column + 32 <= s->dim; column += 32) sum_columns(s, ids, to, column, 4);
        for (; column + 16 <= s->dim; column += 16) sum_columns(s, ids, to, column, 2);
        for (; column + 8 <= s->dim; column += 8) sum_columns(s, ids, to, column, 1);
    }
    return NULL;
}

/* out[bag] = the sum of its rows, on `threads` threads; 0, or -1 if there is no thread. `out` is aligned to 32 bytes. */
int gather(const float *table, const long *ids, float *out, long dim, long num_bags, long bag_size, long ahead,
           int streamed, int threads) {
    struct share shares[MAX_THREADS];
    pthread_t helpers[MAX_THREADS];
    if (threads < 1 || threads > MAX_THREADS) return -1;
    for (long t = 0; t < threads; t++) {
        shares[t] = (struct share){table, ids, out, dim, bag_size, ahead, num_bags * t / threads,
                                   num_bags * (t + 1) / threads, streamed};
        if (t && pthread_create(&helpers[t], NULL, pool, &shares[t])) return -1;
    }
    pool(&shares[0]);
    for (long t = 1; t < threads; t++) pthread_join(helpers[t], NULL);
    return 0;
}
