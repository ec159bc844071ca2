/* NumPy's shuffles of 0 .. size - 1 from many streams, each known by its name: the name's BLAKE2b digest (RFC 7693) is
   the key of a Philox 4x64-10 generator (Salmon et al. 2011). Numbers of as many bits as needed are drawn until one is
   in range. Whoever uses this compares it with NumPy first. */

static const uint64_t BEGIN[8] = {0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
                                  0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u};
static const uint8_t ORDER[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
#define BLOCK 128

INLINE uint64_t turned(uint64_t v, int by) { return v >> by | v << (64 - by); }

/* The first 16 bytes of a digest that is 16 bytes long, of at most a block. */
static void digest(uint64_t key[2], const char *name, long length) {
  uint64_t words[16] = {0}, v[16];
  memcpy(words, name, (size_t)length);
  const uint64_t first = BEGIN[0] ^ 0x01010000u ^ 16u;
  for (int i = 0; i < 8; i++) v[i] = i ? BEGIN[i] : first, v[i + 8] = BEGIN[i];
  v[12] ^= (uint64_t)length, v[14] = ~v[14];
  for (int round = 0; round < 12; round++)
    for (int i = 0; i < 8; i++) {
      static const uint8_t corner[8][4] = {{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15},
                                           {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13}, {3, 4, 9, 14}};
      const uint8_t *order = ORDER[round % 10] + 2 * i;
      uint64_t *a = v + corner[i][0], *b = v + corner[i][1], *c = v + corner[i][2], *d = v + corner[i][3];
      *a += *b + words[order[0]], *d = turned(*d ^ *a, 32), *c += *d, *b = turned(*b ^ *c, 24);
      *a += *b + words[order[1]], *d = turned(*d ^ *a, 16), *c += *d, *b = turned(*b ^ *c, 63);
    }
  key[0] = first ^ v[0] ^ v[8], key[1] = BEGIN[1] ^ v[1] ^ v[9];
}

typedef struct {
  uint64_t key[2], block, made[4];
  int used; /* of the eight numbers of 32 bits in `made` */
} generator;

static void next_block(generator *g) {
  uint64_t now[4] = {++g->block, 0, 0, 0}, key[2] = {g->key[0], g->key[1]};
  for (int round = 0; round < 10; round++) {
    const __uint128_t one = (__uint128_t)0xD2E7470EE14C6C93u * now[0], other = (__uint128_t)0xCA5A826395121157u * now[2];
    now[0] = (uint64_t)(other >> 64) ^ now[1] ^ key[0], now[1] = (uint64_t)other;
    now[2] = (uint64_t)(one >> 64) ^ now[3] ^ key[1], now[3] = (uint64_t)one;
    key[0] += 0x9E3779B97F4A7C15u, key[1] += 0xBB67AE8584CAA73Bu;
  }
  memcpy(g->made, now, sizeof(now));
  g->used = 0;
}

INLINE uint32_t next(generator *g) {
  if (g->used == 8) next_block(g);
  const uint64_t pair = g->made[g->used >> 1];
  return (uint32_t)(g->used++ & 1 ? pair >> 32 : pair);
}

INLINE uint32_t up_to(generator *g, uint32_t most) {
  const uint32_t mask = 0xffffffffu >> __builtin_clz(most);
  uint32_t number;
  do number = next(g) & mask;
  while (number > most);
  return number;
}

/* `orders` shuffles from each stream; the names end with a line break each. 1 where a name is too long. */
int shuffles(const char *names, long streams, long orders, long size, int64_t *out) {
  for (; streams > 0; streams--) {
    const char *end = strchr(names, '\n');
    if (!end || end - names > BLOCK) return 1;
    generator g = {.used = 8};
    digest(g.key, names, end - names);
    names = end + 1;
    for (long order = 0; order < orders; order++, out += size) {
      for (long i = 0; i < size; i++) out[i] = i;
      for (long i = size - 1; i > 0; i--) {
        const uint32_t j = up_to(&g, (uint32_t)i);
        const int64_t kept = out[i];
        out[i] = out[j], out[j] = kept;
      }
    }
  }
  return 0;
}
