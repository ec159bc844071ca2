/* Convolutions over few channels, 2 x 2 max-pooling and updates on one thread of a CPU. All maps are
   [batch][channels][height][width] without gaps, of float or, with DOUBLE defined, of double. Functions that take
   memory of their own return 1 where there is none, else 0. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of a vector register, and how many sums of output channels a processor's registers hold. */
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#if defined(__AVX512F__) || defined(__aarch64__)
#define MOST_PIXELS 8
#define MOST_PRODUCTS 4
#else
#define MOST_PIXELS 6
#define MOST_PRODUCTS 2
#endif

/* Keep a loaded vector in a register: the compiler would load it again for every product. */
#if defined(__AVX512F__)
#define IN_REGISTER(v) __asm__("" : "+v"(v))
#else
#define IN_REGISTER(v)
#endif
#define INLINE static inline __attribute__((always_inline))

/* Bytes of several images that a pass over them may keep in the nearest cache. */
#define NEAR_BYTES 65536

#ifdef DOUBLE
#define REAL double
#define EXP exp
#define LOG log
#define WHOLE int64_t
#else
#define REAL float
#define EXP expf
#define LOG logf
#define WHOLE int32_t
#endif
#define LANES ((long)(VECTOR_BYTES / sizeof(REAL)))

typedef REAL vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(REAL)), may_alias));
typedef REAL small __attribute__((vector_size(16), aligned(sizeof(REAL)), may_alias));
#define SMALL ((long)(16 / sizeof(REAL)))
#define AT(p) (*(const vector *)(p))

/* Three libraries: few runs need all of them, and compiling takes a second. */
#if defined(PLAYING)
#include "playing.h"
#elif defined(DRAWING)
#include "drawing.h"
#else
#include "convolution.h"
#include "pooling.h"
#include "updating.h"
#endif
