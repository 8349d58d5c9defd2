// Pictures and recordings, from a file of the user's to what a request takes, and from an answer to what can be seen.

export async function base64(file) {
  const text = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error(`${file.name} cannot be read`)));
    reader.readAsDataURL(file);
  });
  return text.slice(text.indexOf(",") + 1);
}

// A recording as one channel of samples at the model's rate, decoded here: the service then needs no decoder.
export async function samples(file, rate) {
  let sound;
  try {
    sound = await new OfflineAudioContext(1, 1, rate).decodeAudioData(await file.arrayBuffer());
  } catch {
    throw new Error(`this browser cannot decode ${file.name}: choose a WAV, MP3, OGG or FLAC file`);
  }
  const mixed = new Array(sound.length).fill(0);
  for (let channel = 0; channel < sound.numberOfChannels; channel += 1) {
    const values = sound.getChannelData(channel);
    for (let index = 0; index < mixed.length; index += 1) mixed[index] += values[index] / sound.numberOfChannels;
  }
  // Sixteen bits' worth of digits: more would only make the request longer.
  return { raw: mixed.map((value) => Math.round(value * 32768) / 32768), sampling_rate: rate };
}

// What a PNG or JPEG in base64 begins with.
export const isPicture = (value) => typeof value === "string" && (value.startsWith("iVBORw0KGgo") || value.startsWith("/9j/"));

export function pictureUrl(text) {
  const content = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  return URL.createObjectURL(new Blob([content], { type: text.startsWith("/9j/") ? "image/jpeg" : "image/png" }));
}

// Samples from -1 to 1 as a WAV file: 16 bits, one channel.
export function soundUrl(values, rate) {
  const view = new DataView(new ArrayBuffer(44 + values.length * 2));
  const text = (offset, letters) => [...letters].forEach((letter, index) => view.setUint8(offset + index, letter.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + values.length * 2, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, rate, true);
  view.setUint32(28, rate * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, values.length * 2, true);
  values.forEach((value, index) => view.setInt16(44 + index * 2, Math.max(-1, Math.min(1, value)) * 32767, true));
  return URL.createObjectURL(new Blob([view], { type: "audio/wav" }));
}
